"""The ledger: for each key of a registered architecture's configuration, what a differential test found it to do."""
