"""What a user can do about each finding."""

NOTHING = (
    "The model may depend on the plan. Check the labels and ignore_index, whether the loss depends on trainable "
    "parameters, and training_step for an overflow or a division by zero"
)
PADDING = (
    "To allow padding, give attention over the whole sequence the mask batch['attention_mask'], keep padding and "
    "other samples out of means and statistics (batch norm), and give padding labels that do not count"
)
SHARDING = (
    "A rank holds a contiguous part of the sequence: take positions from batch['position_ids'], make attention "
    "causal by is_causal=True or by a mask over the whole length, attend along the sequence of [B, H, S, D] only, "
    "let no convolution, recurrence, mean or batch norm run over tokens, and count each item on one rank"
)
RECOMPUTE = (
    "A layer must compute the same when its forward runs a second time: no cache (Hugging Face: use_cache=False), "
    "counter or random generator of its own. Other layers can be chosen by layers=[...]"
)
RANDOMNESS = (
    "Draw noise and noise levels with lightning_dcp.sequence_parallel.rand_per_sample, which gives the same "
    "numbers for every plan"
)
