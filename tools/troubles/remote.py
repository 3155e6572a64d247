"""Log lines of remote stores."""

from __future__ import annotations

from tools.troubles.entry import REPORT, Trouble

REMOTE_STORES = [
    Trouble(
        "looking up blocks in store %s failed: %s",
        "Lookups in the store failed and count as misses.",
        "Check the store and the network.",
    ),
    Trouble(
        "a lookup in store %s failed unexpectedly",
        "An error in the client of the store.",
        REPORT,
    ),
    Trouble(
        "store %s does not answer at shutdown: its threads are abandoned",
        "A request to the store hangs.",
        "Check the store and the network.",
    ),
    Trouble(
        "deleting %d blocks from store %s failed: %s",
        "Blocks that were cleared could not be deleted from the store. This engine does not "
        "find them. It deletes them when the store is back; if it ends first, the next engine "
        "does.",
        "Check the store. If the blocks must be gone sooner, delete them with the store's own "
        "tools.",
    ),
    Trouble(
        "deleting %d blocks from store %s is left undone",
        "The thread that asks the store has stopped; the line before says why. The next engine "
        "that starts here deletes them, if a folder for pending deletes is set.",
        "Report the line before, and restart the engine.",
    ),
    Trouble(
        "deleting from store %s failed unexpectedly",
        "An error in the client of the store.",
        REPORT,
    ),
    Trouble(
        "%s is removed: nobody has used its store for long",
        "A list of blocks to delete from a store is dropped, because nobody has used the store "
        "for 30 days.",
        "Nothing if the store no longer exists. Otherwise repeat the clear.",
    ),
    Trouble(
        "the splits of other engines cannot be read: %s",
        "A store did not say how other engines share blocks over their ranks and stages. "
        "kvcore continues with what it knew before.",
        "Nothing: kvcore asks again. If it persists, check the store.",
    ),
    Trouble(
        "only engines with as many ranks and stages find what this one stores: %s",
        "Engines with too many different numbers of ranks or stages use the store with this "
        "model, or one has too many ranks.",
        "Set `prefix` to another value on all of them, or use fewer sizes.",
    ),
    Trouble(
        "%d corrupt values could not be deleted: %s",
        "Damaged values could not be deleted. They are not used.",
        "Check the store.",
    ),
    Trouble(
        "no other node holds KV of %s, only of %s",
        "The nodes of a `peer` store have another model or another `block.tokens`, or split "
        "heads over another number of ranks. Nothing is read from them. Logged once per model.",
        "Nothing before the first prompts. Afterwards, compare the two names and the settings.",
    ),
    Trouble(
        "a promise names %s, which is neither a peer nor in `guests` at `guest_ports`",
        "A request brought a promise of KV at a node that the settings do not admit. Its "
        "blocks are looked for at the peers instead. Logged once per node.",
        "If the node is yours, add its host or network to `guests`, and its ports to "
        "`guest_ports`. Otherwise find out who sends these requests.",
    ),
    Trouble(
        "a promise names an invalid node: %s",
        "The node in a request's promise is not HOST:PORT or HOST:FIRST-LAST.",
        "Use the same version of kvcore on both sides. Proxies must pass promises on unchanged.",
    ),
    Trouble(
        "a request of another node is refused: %s",
        "A `peer` node received something that is not a message of this version, or from a "
        "sender with too many leases. The other nodes are served.",
        "Use the same version of kvcore on all nodes. Find out who connects to `listen`.",
    ),
    Trouble(
        "a request of another node could not be answered",
        "An internal error on this node. The other node computes.",
        REPORT,
    ),
    Trouble(
        "serving other nodes' reads of this node's memory failed",
        "NIXL raised an error. Other nodes wait for bytes, give up, and compute.",
        REPORT,
    ),
    Trouble(
        "promise refused request=%s: %s",
        "A request brought a promise of KV for another prompt, model, tenant or version. It "
        "is looked up like any other request.",
        "Send a promise with the prompt it was made for, to an engine with the same model.",
    ),
]
