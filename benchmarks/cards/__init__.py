"""README's table, docs/results.md, docs/models and the charts, written from the records: `python -m benchmarks.cards`."""
