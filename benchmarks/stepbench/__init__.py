"""Parts of `benchmarks/train_step.py`: shapes, inputs, contestants and how they are measured."""
