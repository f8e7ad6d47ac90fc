"""README's tables, docs/results.md, docs/models and the chart, from the records: `python -m benchmarks.cards`."""
