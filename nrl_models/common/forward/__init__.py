"""Forward-pass features outside of layers: packed documents, positions, token types, shared KV, expert routing."""
