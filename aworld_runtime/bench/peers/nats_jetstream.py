"""NATS JetStream on file storage: publish_async with its acknowledgements awaited, a durable pull consumer for each
role that fetches 200 at once, each acknowledged.

`python nats_jetstream.py --url nats://… --server-pid …`
"""

import asyncio

import nats
from measure import (
    Clock,
    Posted,
    Receipts,
    arguments,
    messages,
    publish_all,
    report,
    role_names,
    run_beside,
)
from nats.errors import TimeoutError as NothingCame
from nats.js import JetStreamContext
from nats.js.api import RetentionPolicy, StorageType

BATCH = 200


async def consume(stream: JetStreamContext.PullSubscription, receipts: Receipts) -> None:
    while True:
        try:
            found = await stream.fetch(BATCH, timeout=1)
        except NothingCame:
            continue
        for item in found:
            receipts.add(Posted.model_validate_json(item.data))
            await item.ack()


async def main() -> None:
    options = arguments()
    made = messages(options)
    receipts = Receipts(len(made))
    client = await nats.connect(options.url)
    stream = client.jetstream()
    await stream.add_stream(
        name="bench",
        subjects=["bench.*"],
        storage=StorageType.FILE,
        retention=RetentionPolicy.WORK_QUEUE,
    )
    subscriptions = [
        await stream.pull_subscribe(f"bench.{role}", durable=role) for role in role_names(options)
    ]

    async def publish(message: Posted) -> None:
        body = message.model_dump_json().encode()
        await (await stream.publish_async(f"bench.{message.to}", body))

    clock = Clock(options.server_pid)
    clock.start()
    run_beside(consume(one, receipts) for one in subscriptions)
    await publish_all(made, options.publishers, publish)
    await receipts.complete()
    await client.flush()
    clock.stop()
    report(clock, made, receipts, "nats-py")


asyncio.run(main())
