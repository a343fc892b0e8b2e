"""Sizes of published Baichuan models, as their `config.json` gives them."""

FIRST_7B = {
    "Baichuan-7B": {
        "vocab_size": 64000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
    }
}
OTHERS = {
    "Baichuan-13B": {
        "vocab_size": 64000,
        "hidden_size": 5120,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
    "Baichuan2-7B": {
        "vocab_size": 125696,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
    },
    "Baichuan2-13B": {
        "vocab_size": 125696,
        "hidden_size": 5120,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
}
"""Values, by configuration key, of published models; what the class has by default is left out."""
