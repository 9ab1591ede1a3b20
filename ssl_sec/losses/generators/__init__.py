"""Generators of rows that have parameters of their own, trained beside the network: HDML and DVML."""
