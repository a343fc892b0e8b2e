"""What a forward needs beside the layers: packed documents, positions, token types, shared keys and values, routing."""
