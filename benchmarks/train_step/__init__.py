"""A training step of a whole model, beside transformers and its patches. Run `python -m benchmarks.train_step --help`.

providers   what a provider's name means; its model, optimizer and step
parity      the checkpoints that all load, and who agrees with transformers in fp32
measure     times and peak memory of one provider's steps; memory has the allocator's figures
profile     one step under the profiler; trace reads what it wrote, floors says what the ops must cost at least
longest     the longest sequence in a given memory
rows        the comparisons that the README quotes, all in one call
children    the processes that providers run in
report      results as tables and images
"""
