"""FastStream on Redis streams: published through pipelines of 100, read by consumer groups in batches of 200, acked.

`python faststream_redis.py --url redis://…`
"""

import asyncio
import logging

from faststream import AckPolicy
from faststream.redis import RedisBroker, StreamSub
from measure import Clock, Posted, Receipts, arguments, messages, report, role_names

PIPELINE = 100
BATCH = 200


async def main() -> None:
    options = arguments()
    made = messages(options)
    receipts = Receipts(len(made))
    broker = RedisBroker(options.url, logger=None, log_level=logging.WARNING)

    def subscribe(role: str) -> None:
        stream = StreamSub(role, group="bench", consumer="bench", batch=True, max_records=BATCH)

        @broker.subscriber(stream=stream, ack_policy=AckPolicy.ACK)
        async def handle(posted: list[Posted]) -> None:
            for message in posted:
                receipts.add(message)

    for role in role_names(options):
        subscribe(role)
    client = await broker.connect()
    await broker.start()
    clock = Clock(options.server_pid)
    clock.start()
    for begin in range(0, len(made), PIPELINE):
        async with client.pipeline(transaction=False) as pipeline:
            for message in made[begin : begin + PIPELINE]:
                await broker.publish(message, stream=message.to, pipeline=pipeline)
            await pipeline.execute()
    await receipts.complete()
    clock.stop()
    report(clock, made, receipts, "faststream redis")


asyncio.run(main())
