"""autogen's GrpcWorkerAgentRuntime: one worker publishes, another handles, over a host; all three in this process.

`python autogen_grpc.py`; its messages are kept in memory.
"""

import asyncio
import logging
import socket

from autogen_core import MessageContext, RoutedAgent, TopicId, TypeSubscription, message_handler
from autogen_core import try_get_known_serializers_for_type as serializers_for
from autogen_ext.runtimes.grpc import GrpcWorkerAgentRuntime, GrpcWorkerAgentRuntimeHost
from measure import Clock, Posted, Receipts, arguments, messages, publish_all, report, role_names


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


async def main() -> None:
    options = arguments()
    logging.disable(logging.WARNING)
    made = messages(options)
    receipts = Receipts(len(made))

    class Handler(RoutedAgent):
        @message_handler
        async def handle(self, message: Posted, ctx: MessageContext) -> None:  # noqa: ARG002 - its signature
            receipts.add(message)

    address = free_address()
    host = GrpcWorkerAgentRuntimeHost(address)
    host.start()
    handling, publishing = GrpcWorkerAgentRuntime(address), GrpcWorkerAgentRuntime(address)
    await handling.start()
    await publishing.start()
    for role in role_names(options):
        await Handler.register(handling, role, lambda: Handler("handles what is posted"))
        await handling.add_subscription(TypeSubscription(topic_type=role, agent_type=role))
    publishing.add_message_serializer(serializers_for(Posted))
    clock = Clock(None)
    clock.start()
    await publish_all(
        made,
        options.publishers,
        lambda message: publishing.publish_message(message, TopicId(message.to, "bench")),
    )
    await receipts.complete()
    clock.stop()
    report(clock, made, receipts, "autogen-core autogen-ext grpcio")


asyncio.run(main())
