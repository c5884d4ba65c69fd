"""What runs inside SGLang's processes: sampler recipe, weight sync, memory hand-over, CPU operators."""
