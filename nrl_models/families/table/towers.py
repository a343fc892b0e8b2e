"""Vision towers that other models use."""

from nrl_models.families.table.row import GATE_UP, QKV, Row

ROWS: dict[str, Row] = {
    "clip": Row("", {"CLIPAttention": QKV}),
    "pixtral": Row("", {"PixtralAttention": QKV, "PixtralMLP": GATE_UP}),
    "radio": Row("", {"RadioAttention": QKV}, since="5.13"),
    "siglip": Row("", {"SiglipAttention": QKV}),
    "siglip2": Row("", {"Siglip2Attention": QKV}),
    "vit": Row("", {"ViTAttention": QKV}),
}
