"""Pipeline schedules as data: GPipe, 1F1B, interleaved, two pipelines fused into one; and the search for short ones."""
