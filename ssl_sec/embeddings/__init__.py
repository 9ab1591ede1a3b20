"""Embeddings of data sets in Parquet files, and exact search in them."""
