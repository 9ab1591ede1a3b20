"""Generators of rows that have parameters of their own, trained together with the network: HDML and DVML."""
