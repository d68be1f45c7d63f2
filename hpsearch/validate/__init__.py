"""Predictions held against published training runs: `python -m hpsearch.validate rows.jsonl`. No torch."""
