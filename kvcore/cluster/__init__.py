"""Registration, discovery and leader election: in etcd under leases, or a list in the settings."""

from kvcore.cluster.base import Candidacy, Directory, Leadership, Member, Membership
from kvcore.cluster.open import open_directory, register

__all__ = [
    "Candidacy",
    "Directory",
    "Leadership",
    "Member",
    "Membership",
    "open_directory",
    "register",
]
