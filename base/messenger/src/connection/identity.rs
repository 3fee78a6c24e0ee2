//! Identities of the two ends of a connection.

use std::cell::Cell;

use forebay_reactor::random;

use crate::transport::Address;
use crate::wire::EntityAddr;

/// Identities of the two ends of a connection.
///
/// Address, name, nonce and target never change.  The entity type of the peer and the own address are those of the last
/// handshake, set before the connection opens.
pub(crate) struct ConnectionIdentity {
    address: Address,
    /// Authenticated name of the peer; empty without authentication, and on the connecting side.
    name: String,
    /// Nonce that distinguishes sessions of one messenger with the same peer: the peer knows each by its address.
    nonce: u32,
    /// Nonce of the peer instance to reach; zero for any.
    target_nonce: u32,
    entity: Cell<u8>,
    own_addr: Cell<Option<EntityAddr>>,
}

impl ConnectionIdentity {
    /// Creates the identities of a connection to any instance of the peer at `address`.
    pub(crate) fn new(address: Address, name: String) -> Self {
        Self::of_instance(address, name, 0)
    }

    /// Creates the identities of a connection to the instance with this nonce; zero for any.
    pub(crate) fn of_instance(address: Address, name: String, target_nonce: u32) -> Self {
        let nonce = (random() as u32).max(1);
        Self { address, name, nonce, target_nonce, entity: Cell::new(0), own_addr: Cell::new(None) }
    }

    /// Returns the address of the peer.
    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// Returns the authenticated name of the peer.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the nonce that distinguishes sessions of one messenger with the same peer.
    pub(crate) fn nonce(&self) -> u32 {
        self.nonce
    }

    /// Returns the peer to reach, as the handshake states it.
    pub(crate) fn target(&self) -> EntityAddr {
        EntityAddr::msgr2(self.address.socket(), self.target_nonce)
    }

    /// Returns the entity type of the peer; zero until it is known.
    #[inline]
    pub(crate) fn entity(&self) -> u8 {
        self.entity.get()
    }

    /// Returns the address of this end as seen by the peer; known to the connecting side only.
    pub(crate) fn own_addr(&self) -> Option<EntityAddr> {
        self.own_addr.get()
    }

    /// Records what a handshake has found.
    pub(crate) fn identify(&self, entity: u8, own_addr: Option<EntityAddr>) {
        self.entity.set(entity);
        self.own_addr.set(own_addr);
    }
}
