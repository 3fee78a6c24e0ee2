//! Messenger of ordered, typed messages between processes, over TCP, RDMA, Unix sockets, shared memory and within the
//! process.
//!
//! A [`Messenger`] is an endpoint on a reactor's [`MessengerCore`]; it listens and connects.  A [`Connection`] carries
//! [`Message`]s in order, across reconnects.  [`wire`] is the wire format of Ceph's msgr2.1, [`session`] its state
//! machines without any I/O.  The design is in `docs/design/messenger.md`, the wire format in `docs/formats/msgr2.md`.
//!
//! ```
//! use forebay_messenger::{Connection, Message, Messenger, MessengerCore, MessengerOptions, Policy};
//! use forebay_reactor::{Buf, DriverChoice, Reactor};
//! let reactor = Reactor::system(DriverChoice::Auto)?;
//! reactor.block_on(async {
//!     let core = MessengerCore::default();
//!     let echo = |connection: &Connection, message: Message| {
//!         let reply = message.reply(2).data(message.data.clone());
//!         connection.post(reply).expect("there is room for one");
//!     };
//!     let server = Messenger::new(&core, MessengerOptions::default(), echo);
//!     let address = server.bind(&"127.0.0.1:0".parse().unwrap())?;
//!     let client = Messenger::new(&core, MessengerOptions::default(), |_: &Connection, _: Message| {});
//!     let connection = client.connect(&address, Policy::LosslessPeer);
//!     let reply = connection.request(Message::new(1).data(Buf::copy_of(b"hello"))).await.unwrap();
//!     assert_eq!(reply.data.to_vec(), b"hello");
//!     server.shutdown();
//!     client.shutdown();
//!     Ok::<(), std::io::Error>(())
//! })?;
//! # Ok::<(), std::io::Error>(())
//! ```

mod connection;
mod endpoint;
mod engine;
#[cfg(any(fuzzing, test, feature = "fuzz"))]
pub mod fuzz;
mod loopback;
mod message;
mod messenger;
mod messenger_core;
mod options;
pub mod perf;
mod priority;
mod requests;
pub mod session;
mod throttle;
mod transport;
mod window;
pub mod wire;

pub use connection::{Connection, ConnectionState, DisconnectReason, SendError};
pub use forebay_reactor::Network;
pub use message::{Message, MessageRole, priority as message_priority};
pub use messenger::{Handler, Messenger};
pub use messenger_core::MessengerCore;
pub use options::{Auth, MessengerOptions};
pub use session::{Keyring, Policy, SessionViolation, SharedKey};
pub use throttle::MessageBudget;
pub use transport::Address;
pub use window::{MemoryWindow, WINDOW_DESCRIPTOR_LEN, WindowContent, WindowDescriptor, WriteError};
