"""One buffer for gradients and KV caches, on a CPU that plays a GPU."""

import torch

from rlhf_spmd.runtime.world.scratch import Scratch, scratch

CPU = torch.device("cpu")


def test_a_cache_has_the_memory_of_gradients_that_are_gone():
    memory = Scratch(CPU, lasts=True)
    gradients = memory.take(1000, grows=True)
    place = gradients.data_ptr()
    beside = memory.take(400, grows=False)  # e.g. while training waits
    assert memory.idle_bytes == 0 and not place <= beside.data_ptr() < place + 1000
    del gradients, beside
    assert memory.idle_bytes == 1000
    for _ in range(3):  # iterations: graphs stay valid
        cache = memory.take(400, grows=False)
        assert cache.data_ptr() == place and len(cache) == 400
        del cache
        assert memory.take(1000, grows=True).data_ptr() == place
        memory.release()
    assert memory.idle_bytes == 1000


def test_the_largest_model_sets_the_size():
    memory = Scratch(CPU, lasts=True)
    for num_bytes in (10, 30, 20):
        assert len(memory.take(num_bytes, grows=True)) == num_bytes
    assert memory.idle_bytes == 30


def test_a_larger_cache_has_its_own_and_the_buffer_is_freed_for_the_next():
    memory = Scratch(CPU, lasts=True)
    memory.take(100, grows=True)
    cache = memory.take(101, grows=False)
    assert memory.idle_bytes == 100 and len(cache) == 101
    del cache
    memory.take(100, grows=True)
    memory.release()
    assert memory.idle_bytes == 0
    memory.take(100, grows=True)
    memory.take(50, grows=False)
    memory.release()  # what was wanted before does not count
    assert memory.idle_bytes == 100


def test_a_view_alone_does_not_keep_the_buffer():
    memory = Scratch(CPU, lasts=True)
    view = memory.take(8, grows=True).view(torch.float32)
    assert memory.idle_bytes == 8 and len(view) == 2


def test_a_cpu_has_no_buffer_but_zeros():
    first = scratch(CPU).take(16, grows=True)
    first.fill_(1)
    del first
    assert scratch(CPU).idle_bytes == 0 and not scratch(CPU).take(16, grows=False).any()
