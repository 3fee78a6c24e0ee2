//! Small vhost-user front-end with drivers of virtio-blk and virtio-scsi for tests, with features that no virtual
//! machine monitor offers.
//!
//! [`front_end`] is the virtual machine monitor's side of the protocol: it negotiates, shares [`memory`] and sets up
//! queues, and it sends any other bytes and descriptors, too.  [`rings`] are the driver's side of virtqueues in both
//! formats, [`block`] puts virtio-blk requests on them, [`scsi`] those of virtio-scsi.  [`hostile`] are front-ends that
//! break the rules, [`crash`] is one that outlives its device, [`load`] measures a device.  Messages, rings and
//! requests are encoded after the specifications, deliberately separate from the code of the device.

#![warn(missing_docs)]

pub mod block;
pub mod buffers;
pub mod channel;
pub mod crash;
pub mod device;
pub mod error;
pub mod front_end;
pub mod hostile;
pub mod load;
pub mod memory;
pub mod message;
pub mod queue;
pub mod rings;
pub mod scsi;
pub mod socket;

pub use block::{BlockCompletion, VirtioBlkConfig, VirtioBlkRequest};
pub use buffers::{UsedBuffers, VirtqBuffers};
pub use channel::BackendChannel;
pub use crash::ResumableFrontEnd;
pub use device::DeviceUnderTest;
pub use error::{FrontEndError, Result};
pub use front_end::{FrontEnd, FrontEndOptions, FrontEndStage, VirtioDeviceType};
pub use memory::{GuestMemory, MemoryLayout};
pub use queue::FrontEndQueue;
pub use scsi::{ScsiHost, ScsiHostCommand, ScsiHostCompletion, ScsiHostConfig, ScsiHostControl, ScsiHostEvent};
