"""autogen-core's SingleThreadedAgentRuntime: published to a topic for each role, handled by a RoutedAgent; nothing is durable.

`python autogen_local.py`
"""

import asyncio
import logging

from autogen_core import (
    MessageContext,
    RoutedAgent,
    SingleThreadedAgentRuntime,
    TopicId,
    TypeSubscription,
    message_handler,
)
from measure import Clock, Posted, Receipts, arguments, messages, publish_all, report, role_names


async def main() -> None:
    options = arguments()
    logging.disable(logging.WARNING)
    made = messages(options)
    receipts = Receipts(len(made))

    class Handler(RoutedAgent):
        @message_handler
        async def handle(self, message: Posted, ctx: MessageContext) -> None:  # noqa: ARG002 - its signature
            receipts.add(message)

    runtime = SingleThreadedAgentRuntime()
    for role in role_names(options):
        await Handler.register(runtime, role, lambda: Handler("handles what is posted"))
        await runtime.add_subscription(TypeSubscription(topic_type=role, agent_type=role))
    runtime.start()
    clock = Clock(None)
    clock.start()
    await publish_all(
        made,
        options.publishers,
        lambda message: runtime.publish_message(message, TopicId(message.to, "bench")),
    )
    await receipts.complete()
    clock.stop()
    report(clock, made, receipts, "autogen-core")


asyncio.run(main())
