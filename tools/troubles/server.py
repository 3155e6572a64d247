"""Log lines of the server and its clients."""

from __future__ import annotations

from tools.troubles.entry import NOTHING, Trouble

SERVER = [
    Trouble(
        "the session with the kvcore server has failed: joining it anew",
        "An internal error of kvcore while it kept its session. What was in flight is computed.",
        "Report the traceback.",
    ),
    Trouble(
        "no kvcore server answers: the engine computes until one does",
        "The engine started before its server, or uses a wrong address.",
        "Start `kvcore server`, or correct `server.address`. Engines join by themselves.",
    ),
    Trouble(
        "the server does not answer in %g s",
        "The engine computes, and sends no requests until the server answers a heartbeat.",
        "If it happens often, give the server a CPU core of its own, or raise `server.deadline_s`.",
    ),
    Trouble(
        "the kvcore server keeps no tokens of what is stored, and only marked chunks are "
        "found: set fusion.enabled for the server too",
        "Fusion is on in the engine and off in the server, so the server does not know the "
        "text of its blocks.",
        "Start the server with the engines' config file, or set `fusion.enabled` there.",
    ),
    Trouble(
        "the server's memory cannot be mapped: %s",
        "A worker finds the server's host memory and cannot map it. Until it can, its engine "
        "computes.",
        "Give the worker access to `server.folder` and to the folder of the memory, and enough "
        "address space (`ulimit -v`).",
    ),
    Trouble(
        "the server's memory could not be tended",
        "The thread that pins and releases the server's memory met an error, which is in the "
        "line. It goes on.",
        "If the error is one of the GPU, restart the engine. Otherwise report it.",
    ),
    Trouble(
        "the kvcore server is gone: the engine computes until it is back",
        "The server was silent for a whole lease.",
        "Start it again. Blocks on disk are found again.",
    ),
    Trouble(
        "the kvcore server takes no more messages: joining it anew",
        "The server was thousands of messages behind, and the engine could not report what "
        "has ended. With a new session, the server releases all of it.",
        "If it happens often, give the server a CPU core of its own.",
    ),
    Trouble(
        "no kvcore server is joined, because of other users: %s",
        "The folder, the socket or a file of the server belongs to another user, or other users "
        "may change it. Nothing is sent there. The engine computes, and asks again every 5 s.",
        "If another user made the folder, have it removed, or set `server.folder`. Otherwise start "
        "the server and its engines as one user, and give the folder mode 0700.",
    ),
    Trouble(
        "%s of a server that ended stays: %s",
        "The folder in which an earlier server kept its host tier could not be removed.",
        "Remove it by hand: its memory is not freed otherwise.",
    ),
    Trouble(
        "the kvcore server refuses this engine: %s",
        "Versions, the model or settings do not match. The engine runs without shared KV.",
        "Do what the message says. Usually both sides need the same version of kvcore.",
    ),
    Trouble(
        "not sent: %s",
        "A message exceeds the size that the protocol allows. The prompt is computed.",
        "Nothing, unless prompts have millions of tokens.",
    ),
    Trouble(
        "refused kind=%s: %s",
        "The server refused a client's request; the line says why. The client computes.",
        "Find out which client it is: one of another version, or not a kvcore client at all.",
    ),
    Trouble(
        "refused: session of another client session=%d who=%s",
        "A client named a session that its connection did not open. Nothing was done.",
        "Nothing if its connection broke: it joins again. Otherwise find out what `who` is.",
    ),
    Trouble(
        "a request failed kind=%s",
        "An internal error of the server. The client computes.",
        "Report it, with the lines that follow.",
    ),
    Trouble(
        "a reply is lost: %s",
        "The client does not receive its replies: it is gone, or stopped.",
        NOTHING,
    ),
    Trouble(
        "%s: `kvcore ctl` finds nothing by tenant, salt or tokens",
        "An engine and the server differ in `namespace.secret` or `namespace.salt`. KV is shared "
        "as before. A server with tenants or quotas refuses such an engine instead.",
        "Give both the same secret and salt.",
    ),
    Trouble(
        "session is silent session=%d seconds=%.1f",
        "A client's process is alive but sends nothing. The server keeps the slots that its "
        "copies may use.",
        "Check that process: is it stopped?",
    ),
    Trouble(
        "read failed graph=%d op=%d: %s",
        "The server did not report the result of a read in time. The prompt is computed.",
        "Look at the server's log.",
    ),
    Trouble(
        "graph refused graph=%d: %s",
        "A transfer belongs to a session that has ended, or to another server. Its tokens are "
        "computed.",
        NOTHING,
    ),
]
