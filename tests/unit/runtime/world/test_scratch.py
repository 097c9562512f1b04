"""One buffer for gradients and KV caches, on a CPU that plays a GPU."""

import torch

from rlhf_spmd.runtime.world.scratch import Scratch

CPU = torch.device("cpu")


def test_a_cache_has_the_memory_of_gradients_that_are_gone():
    memory = Scratch(CPU, lasts=True)
    gradients = memory.take(1000, is_cache=False)
    place = gradients.data_ptr()
    del gradients
    assert memory.idle_bytes == 1000
    for _ in range(3):  # iterations: graphs stay valid
        cache = memory.take(400, is_cache=True)
        assert cache.data_ptr() == place and len(cache) == 400
        del cache
        assert memory.take(1000, is_cache=False).data_ptr() == place
        memory.release()
    assert memory.idle_bytes == 1000


def test_a_cache_beside_training_never_has_the_memory_of_gradients():
    """Else they would need as much again."""
    memory = Scratch(CPU, lasts=True)
    for _ in range(3):
        cache = memory.take(400, is_cache=True)
        place = memory.take(1000, is_cache=False).data_ptr()
        assert not place <= cache.data_ptr() < place + 1000
        memory.release()
        assert memory.idle_bytes == 1000 and memory.cache_bytes == 0
        del cache


def test_two_caches_at_one_time_have_two_memories():
    memory = Scratch(CPU, lasts=True)
    memory.take(1000, is_cache=False)
    first, second = memory.take(400, is_cache=True), memory.take(400, is_cache=True)
    assert first.data_ptr() != second.data_ptr()
    memory.release()
    del first
    assert memory.idle_bytes == 1000, "a buffer in use is not dropped"
