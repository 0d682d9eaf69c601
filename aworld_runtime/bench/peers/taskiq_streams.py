"""taskiq on Redis streams (RedisStreamBroker): a broker and a receiver for each role, 100 tasks at once, acked when done.

`python taskiq_streams.py --url redis://…`
"""

import asyncio
import logging

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
from taskiq.api import run_receiver_task
from taskiq_redis import RedisStreamBroker


async def main() -> None:
    options = arguments()
    logging.disable(logging.WARNING)
    made = messages(options)
    receipts = Receipts(len(made))
    brokers = {
        role: RedisStreamBroker(options.url, queue_name=role, consumer_group_name="bench")
        for role in role_names(options)
    }

    async def handle(posted: Posted) -> None:
        receipts.add(posted)

    tasks = {
        role: broker.register_task(handle, task_name=f"handle-{role}")
        for role, broker in brokers.items()
    }
    for broker in brokers.values():
        broker.is_worker_process = True
        await broker.startup()
    run_beside(run_receiver_task(broker) for broker in brokers.values())
    clock = Clock(options.server_pid)
    clock.start()
    await publish_all(made, options.publishers, lambda message: tasks[message.to].kiq(message))
    await receipts.complete()
    clock.stop()
    report(clock, made, receipts, "taskiq taskiq-redis redis")


asyncio.run(main())
