"""A scheduler on a device without a model, and the prompts that it is given."""

from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.scheduler import Scheduler
from tests.engine.scheduler.device import Clock, Device, Loop, make_request, true_output

BLOCK = 4


class Engine:
    """Runs requests step by step; with depth 1 each step is scheduled while the one before it runs.

    Attributes:
        tokens: what each request has given so far.
    """

    def __init__(
        self, *, blocks: int = 64, seqs: int = 8, budget: int = 16, length: int = 128, depth: int = 0, **options
    ) -> None:
        self.clock = Clock()
        self.kv = KVCacheManager(
            blocks, block_size=BLOCK, root=bytes(32), enable_prefix_caching=options.pop("caching", True)
        )
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=length,
            clock=self.clock,
            **options,
        )
        self.device = Device(BLOCK, seqs)
        self.loop = Loop(self.scheduler, self.device, depth)
        self.tokens: dict[str, list[int]] = {}

    def add(self, request_id: str, prompt, **options):
        request = make_request(request_id, prompt, **options)
        self.scheduler.add(request)
        return request

    def step(self):
        work, outputs = self.loop.step()
        return work, self.take(outputs)

    def take(self, outputs):
        """Keeps the tokens of outputs, and returns these by request."""
        self.scheduler.check_integrity()
        by_id = {output.request_id: output for output in outputs}
        assert len(by_id) == len(outputs)
        for request_id, output in by_id.items():
            self.tokens.setdefault(request_id, []).extend(output.new_token_ids)
        return by_id

    def finish(self):
        """Runs to the end; the last output of each request."""
        last = {}
        for _ in range(1000):
            if not self.loop.busy:
                break
            last |= self.step()[1]
        assert not self.loop.busy
        assert self.kv.block_pool.num_used == 0
        return last

    def blocks(self, request_id: str) -> list[int]:
        return [block.block_id for block in self.kv.req_to_blocks[request_id]]


def prompt(number: int, length: int) -> list[int]:
    """Prompts of different numbers share no block."""
    return [number, *range(1, length)]


def output_of(**options) -> list[int]:
    """What a request of five prompt tokens must give."""
    return true_output(make_request("x", prompt(1, 5), **options).spec, 128)
