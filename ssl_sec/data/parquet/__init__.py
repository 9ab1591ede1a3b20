"""Parquet files in the Hugging Face layout: their rows, their labels and their memory-mapped cache."""
