"""The SGLang engine: stock SGLang as a subprocess, extended through its own plug-in mechanism.

`engine` is the `RolloutEngine`; `process` starts and stops the server, `client` talks to it, `messages` turns records
into requests and responses into records, and `contract` reads from SGLang's source whether the installed version
fits. ``server_side`` runs inside the server's processes and is imported nowhere else.
"""
