"""Rows beside those of a batch: HDML and DVML, with parameters of their own, and those of earlier batches."""
