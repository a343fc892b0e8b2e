"""One small cell with a bound that only equal precision meets."""

from nrl_models.consistency.cells import Settings
from nrl_models.logprobs import Sampling

SETTINGS = Settings(
    lengths=(24,),
    data=("dummy",),
    modes=("sampling",),
    batches=(2,),
    sampling=Sampling(0.8, top_p=0.95),
    new_tokens=8,
    threshold=1.001,
)
