"""The ledger: the effect of each configuration key of a registered architecture, measured by a differential test."""
