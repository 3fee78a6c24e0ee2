//! Messages of the generic netlink family `nbd` (`include/uapi/linux/nbd-netlink.h`).

use super::netlink::{
    MalformedMessage, NetlinkAttributes, NetlinkMessage, attributes, find, read_string, read_u16, read_u32, request,
};

/// Family of the controller, which has the numbers of all others.
const CONTROLLER: u16 = 16;
const CONTROLLER_GET_FAMILY: u8 = 3;
const CONTROLLER_ATTR_FAMILY_ID: u16 = 1;
const CONTROLLER_ATTR_FAMILY_NAME: u16 = 2;
const CONTROLLER_ATTR_GROUPS: u16 = 7;
const CONTROLLER_ATTR_GROUP_NAME: u16 = 1;
const CONTROLLER_ATTR_GROUP_ID: u16 = 2;

const FAMILY_NAME: &str = "nbd";
const GROUP_NAME: &str = "nbd_mc_group";
const VERSION: u8 = 1;

const CONNECT: u8 = 1;
const DISCONNECT: u8 = 2;
const RECONFIGURE: u8 = 3;
const LINK_DEAD: u8 = 4;

const ATTR_INDEX: u16 = 1;
const ATTR_SIZE_BYTES: u16 = 2;
const ATTR_BLOCK_SIZE_BYTES: u16 = 3;
const ATTR_TIMEOUT: u16 = 4;
const ATTR_SERVER_FLAGS: u16 = 5;
const ATTR_SOCKETS: u16 = 7;
const ATTR_DEAD_CONN_TIMEOUT: u16 = 8;
const ATTR_BACKEND_IDENTIFIER: u16 = 10;
const SOCK_ITEM: u16 = 1;
const SOCK_FD: u16 = 1;

/// Settings of a new device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewNbdDevice {
    /// Size in bytes.
    pub size: u64,
    /// Logical block size in bytes: a power of two from 512 to the page size.
    pub block_size: u64,
    /// Seconds after which a request without a reply is sent again over another or a new connection; with 0 and one
    /// connection, only once that connection has ended.
    pub timeout: u64,
    /// Seconds for which requests wait for a new connection when all have ended; then they fail.
    pub dead_connection_timeout: u64,
    /// Transmission flags of the export.
    pub server_flags: u64,
    /// File descriptors of negotiated sockets.
    pub sockets: Vec<u32>,
    /// Identifier that later changes must repeat, in `/sys/block/nbdN/backend`; kernels before 5.14 ignore it.
    pub backend: String,
}

/// Returns the request for the number of the family `nbd`.  A kernel without the module answers ENOENT.
pub fn find_family(sequence: u32) -> Vec<u8> {
    let attributes = NetlinkAttributes::new().string(CONTROLLER_ATTR_FAMILY_NAME, FAMILY_NAME);
    request(CONTROLLER, CONTROLLER_GET_FAMILY, 1, sequence, &attributes)
}

/// The family `nbd`, as the running kernel has numbered it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NbdFamily {
    /// Message type.
    pub id: u16,
    /// Multicast group of its notifications.
    pub group: Option<u32>,
}

impl NbdFamily {
    /// Parses the reply to [`find_family`].
    ///
    /// # Errors
    /// If the message is malformed.
    pub fn parse(message: &NetlinkMessage<'_>) -> Result<Self, MalformedMessage> {
        let NetlinkMessage::Generic { family: CONTROLLER, attributes: body, .. } = message else {
            return Err(MalformedMessage);
        };
        let mut group = None;
        if let Ok(groups) = find(body, CONTROLLER_ATTR_GROUPS) {
            for each in attributes(groups) {
                let (_, each) = each?;
                if read_string(find(each, CONTROLLER_ATTR_GROUP_NAME)?)? == GROUP_NAME {
                    group = Some(read_u32(find(each, CONTROLLER_ATTR_GROUP_ID)?)?);
                }
            }
        }
        Ok(Self { id: read_u16(find(body, CONTROLLER_ATTR_FAMILY_ID)?)?, group })
    }

    /// Returns the request for a new device; the kernel chooses its number and replies with it.
    pub fn connect(&self, sequence: u32, device: &NewNbdDevice) -> Vec<u8> {
        let attributes = NetlinkAttributes::new()
            .u64(ATTR_SIZE_BYTES, device.size)
            .u64(ATTR_BLOCK_SIZE_BYTES, device.block_size)
            .u64(ATTR_TIMEOUT, device.timeout)
            .u64(ATTR_SERVER_FLAGS, device.server_flags)
            .u64(ATTR_DEAD_CONN_TIMEOUT, device.dead_connection_timeout)
            .string(ATTR_BACKEND_IDENTIFIER, &device.backend)
            .nested(ATTR_SOCKETS, &sockets(&device.sockets));
        request(self.id, CONNECT, VERSION, sequence, &attributes)
    }

    /// Returns the request that replaces connections that have ended; the kernel ignores sockets that are left over.
    pub fn reconnect(&self, sequence: u32, index: u32, backend: &str, fds: &[u32]) -> Vec<u8> {
        let attributes = NetlinkAttributes::new()
            .u32(ATTR_INDEX, index)
            .string(ATTR_BACKEND_IDENTIFIER, backend)
            .nested(ATTR_SOCKETS, &sockets(fds));
        request(self.id, RECONFIGURE, VERSION, sequence, &attributes)
    }

    /// Returns the request that changes the size of a device.
    pub fn resize(&self, sequence: u32, index: u32, backend: &str, size: u64) -> Vec<u8> {
        let attributes = NetlinkAttributes::new()
            .u32(ATTR_INDEX, index)
            .string(ATTR_BACKEND_IDENTIFIER, backend)
            .u64(ATTR_SIZE_BYTES, size);
        request(self.id, RECONFIGURE, VERSION, sequence, &attributes)
    }

    /// Returns the request that ends a device; its requests in flight fail.
    pub fn disconnect(&self, sequence: u32, index: u32) -> Vec<u8> {
        request(self.id, DISCONNECT, VERSION, sequence, &NetlinkAttributes::new().u32(ATTR_INDEX, index))
    }

    /// Parses the reply to [`connect`](Self::connect): the number of the device.
    ///
    /// # Errors
    /// If the message is malformed or another.
    pub fn parse_connected(&self, message: &NetlinkMessage<'_>) -> Result<u32, MalformedMessage> {
        self.parse_index(message, CONNECT)
    }

    /// Parses the notification that a connection of a device has ended: the number of the device.
    ///
    /// # Errors
    /// If the message is malformed or another.
    pub fn parse_link_dead(&self, message: &NetlinkMessage<'_>) -> Result<u32, MalformedMessage> {
        self.parse_index(message, LINK_DEAD)
    }

    fn parse_index(&self, message: &NetlinkMessage<'_>, wanted: u8) -> Result<u32, MalformedMessage> {
        match message {
            NetlinkMessage::Generic { family, command, attributes, .. } if (*family, *command) == (self.id, wanted) => {
                read_u32(find(attributes, ATTR_INDEX)?)
            }
            _ => Err(MalformedMessage),
        }
    }
}

fn sockets(fds: &[u32]) -> NetlinkAttributes {
    fds.iter()
        .fold(NetlinkAttributes::new(), |list, fd| list.nested(SOCK_ITEM, &NetlinkAttributes::new().u32(SOCK_FD, *fd)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::kernel::netlink::messages;

    const FAMILY: NbdFamily = NbdFamily { id: 30, group: Some(5) };

    fn only(datagram: &[u8]) -> NetlinkMessage<'_> {
        messages(datagram).next().expect("a message").expect("well-formed")
    }

    #[test]
    fn the_family_and_its_group_are_found() {
        let group =
            NetlinkAttributes::new().u32(CONTROLLER_ATTR_GROUP_ID, 5).string(CONTROLLER_ATTR_GROUP_NAME, GROUP_NAME);
        let other =
            NetlinkAttributes::new().string(CONTROLLER_ATTR_GROUP_NAME, "other").u32(CONTROLLER_ATTR_GROUP_ID, 6);
        let attributes = NetlinkAttributes::new()
            .string(CONTROLLER_ATTR_FAMILY_NAME, "nbd")
            .bytes(CONTROLLER_ATTR_FAMILY_ID, &30_u16.to_ne_bytes())
            .nested(CONTROLLER_ATTR_GROUPS, &NetlinkAttributes::new().nested(1, &other).nested(2, &group));
        let reply = request(CONTROLLER, 1, 2, 1, &attributes);
        assert_eq!(NbdFamily::parse(&only(&reply)), Ok(FAMILY));
        let without = NetlinkAttributes::new().bytes(CONTROLLER_ATTR_FAMILY_ID, &30_u16.to_ne_bytes());
        let reply = request(CONTROLLER, 1, 2, 1, &without);
        assert_eq!(NbdFamily::parse(&only(&reply)), Ok(NbdFamily { id: 30, group: None }));
        let reply = request(CONTROLLER, 1, 2, 1, &NetlinkAttributes::new());
        assert_eq!(NbdFamily::parse(&only(&reply)), Err(MalformedMessage));
    }

    #[test]
    fn a_device_is_described_with_its_sockets() {
        let device = NewNbdDevice {
            size: 1 << 30,
            block_size: 512,
            timeout: 0,
            dead_connection_timeout: 600,
            server_flags: 0x10d,
            sockets: vec![8, 9],
            backend: "forebay:local/x".into(),
        };
        let message = FAMILY.connect(1, &device);
        let NetlinkMessage::Generic { command: CONNECT, attributes: body, .. } = only(&message) else {
            panic!("{message:?}");
        };
        let fds: Vec<u32> = attributes(find(body, ATTR_SOCKETS).expect("sockets"))
            .map(|item| item.expect("an item").1)
            .map(|item| find(item, SOCK_FD).and_then(read_u32).expect("a descriptor"))
            .collect();
        assert_eq!(fds, [8, 9]);
        assert_eq!(find(body, ATTR_BACKEND_IDENTIFIER).and_then(read_string), Ok("forebay:local/x"));
        assert_eq!(find(body, ATTR_SIZE_BYTES).map(<[u8]>::len), Ok(8));
    }

    #[test]
    fn only_notifications_of_a_dead_link_are_such() {
        let notification = request(30, LINK_DEAD, 1, 0, &NetlinkAttributes::new().u32(ATTR_INDEX, 3));
        assert_eq!(FAMILY.parse_link_dead(&only(&notification)), Ok(3));
        assert_eq!(FAMILY.parse_connected(&only(&notification)), Err(MalformedMessage));
        let other = request(31, LINK_DEAD, 1, 0, &NetlinkAttributes::new().u32(ATTR_INDEX, 3));
        assert_eq!(FAMILY.parse_link_dead(&only(&other)), Err(MalformedMessage));
    }

    proptest! {
        #[test]
        fn foreign_messages_are_parsed_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let with_header = [&(bytes.len() as u32 + 16).to_ne_bytes()[..], &16_u16.to_ne_bytes(), &[0; 10], &bytes].concat();
            for datagram in [&bytes, &with_header] {
                for message in messages(datagram).flatten() {
                    let _ = NbdFamily::parse(&message);
                    let _ = FAMILY.parse_link_dead(&message);
                }
            }
        }
    }
}
