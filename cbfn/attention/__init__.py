"""Paged attention backends: plain functions of queries, the KV cache and index tensors."""
