//! One method for each message.

use std::os::fd::{AsFd, BorrowedFd};

use super::FrontEnd;
use crate::error::{FrontEndError, Result};
use crate::memory::SharedArea;
use crate::message::{
    self, FrontEndMessage, InflightDescription, IotlbMessage, NEED_REPLY, NO_DESCRIPTOR, REPLY, RegionDescription,
    RingAddresses, VERSION, protocol, request,
};

impl FrontEnd {
    /// Sends a message that has a reply, and receives it.
    ///
    /// # Errors
    /// [`FrontEndError::Violation`] when the reply is one to another request.
    pub fn call(&self, request: u32, payload: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<FrontEndMessage> {
        self.socket.send(&message::encode(request, VERSION, payload), descriptors)?;
        self.reply_to(request)
    }

    /// Receives the reply to a request.
    ///
    /// # Errors
    /// [`FrontEndError::Violation`] when the reply is one to another request.
    pub fn reply_to(&self, request: u32) -> Result<FrontEndMessage> {
        let reply = self.receive()?;
        // The bit that asks for an acknowledgement may be returned.
        if reply.request != request || reply.flags & !NEED_REPLY != VERSION | REPLY {
            let said = format!("reply {} with flags {:#x} to request {request}", reply.request, reply.flags);
            return Err(FrontEndError::Violation(said));
        }
        Ok(reply)
    }

    /// Sends a message that has no reply, and receives its acknowledgement if the device can acknowledge.
    ///
    /// # Errors
    /// [`FrontEndError::Refused`] when the device refuses it.
    pub fn tell(&self, request: u32, payload: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        if !self.has_protocol(protocol::REPLY_ACK) {
            return self.socket.send(&message::encode(request, VERSION, payload), descriptors);
        }
        self.socket.send(&message::encode(request, VERSION | NEED_REPLY, payload), descriptors)?;
        let reply = self.reply_to(request)?;
        acknowledged(request, number(&reply)?)
    }

    fn call_for_number(&self, request: u32) -> Result<u64> {
        number(&self.call(request, &[], &[])?)
    }

    /// Returns the features that the device offers.
    ///
    /// # Errors
    /// As of [`call`](Self::call).
    pub fn get_features(&self) -> Result<u64> {
        self.call_for_number(request::GET_FEATURES)
    }

    /// Sets the negotiated features.
    ///
    /// # Errors
    /// As of [`tell`](Self::tell).
    pub fn set_features(&mut self, features: u64) -> Result<()> {
        self.tell(request::SET_FEATURES, &features.to_ne_bytes(), &[])?;
        self.features = features;
        Ok(())
    }

    /// Returns the protocol features that the device offers.
    ///
    /// # Errors
    /// As of [`call`](Self::call).
    pub fn get_protocol_features(&self) -> Result<u64> {
        self.call_for_number(request::GET_PROTOCOL_FEATURES)
    }

    /// Sets the negotiated protocol features.
    ///
    /// # Errors
    /// As of [`tell`](Self::tell).
    pub fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        self.tell(request::SET_PROTOCOL_FEATURES, &features.to_ne_bytes(), &[])?;
        self.protocol_features = features;
        Ok(())
    }

    /// Begins a session.
    ///
    /// # Errors
    /// As of [`tell`](Self::tell).
    pub fn set_owner(&self) -> Result<()> {
        self.tell(request::SET_OWNER, &[], &[])
    }

    /// Resets the device, if RESET_DEVICE is negotiated.
    ///
    /// # Errors
    /// As of [`tell`](Self::tell).
    pub fn reset_device(&self) -> Result<()> {
        self.tell(request::RESET_DEVICE, &[], &[])
    }

    /// Returns the number of queues that the device has.
    ///
    /// # Errors
    /// As of [`call`](Self::call).
    pub fn get_queue_num(&self) -> Result<u64> {
        self.call_for_number(request::GET_QUEUE_NUM)
    }

    /// Returns the number of memory regions that the device takes.
    ///
    /// # Errors
    /// As of [`call`](Self::call).
    pub fn get_max_mem_slots(&self) -> Result<u64> {
        self.call_for_number(request::GET_MAX_MEM_SLOTS)
    }

    /// Returns the device status.
    ///
    /// # Errors
    /// As of [`call`](Self::call).
    pub fn get_status(&self) -> Result<u64> {
        self.call_for_number(request::GET_STATUS)
    }

    /// Sets the device status.
    ///
    /// # Errors
    /// As of [`tell`](Self::tell).
    pub fn set_status(&self, status: u64) -> Result<()> {
        self.tell(request::SET_STATUS, &status.to_ne_bytes(), &[])
    }

    /// Reads bytes of the configuration.
    ///
    /// # Errors
    /// [`FrontEndError::Refused`] when the device replies without them.
    pub fn get_config(&self, offset: u32, size: u32) -> Result<Vec<u8>> {
        let payload = message::config(offset, size, 0, &vec![0; size as usize]);
        let reply = self.call(request::GET_CONFIG, &payload, &[])?;
        if reply.payload.len() != payload.len() {
            return Err(FrontEndError::Refused { request: request::GET_CONFIG, value: reply.payload.len() as u64 });
        }
        Ok(reply.payload[12..].to_vec())
    }

    /// Writes bytes of the configuration; flags of 1 are those of a migration.
    ///
    /// # Errors
    /// As of [`tell`](Self::tell).
    pub fn set_config(&self, offset: u32, flags: u32, bytes: &[u8]) -> Result<()> {
        self.tell(request::SET_CONFIG, &message::config(offset, bytes.len() as u32, flags, bytes), &[])
    }

    /// Gives the device its end of the back-end channel.
    ///
    /// # Errors
    /// As of [`tell`](Self::tell).
    pub fn set_backend_channel(&self, theirs: &impl AsFd) -> Result<()> {
        self.tell(request::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()])
    }

    /// Gives the device all regions of guest memory, in place of those it has.
    ///
    /// # Errors
    /// As of [`tell`](Self::tell).
    pub fn set_memory_table(&self) -> Result<()> {
        let regions = self.memory.regions();
        let descriptions: Vec<RegionDescription> = regions.iter().map(|region| region.description()).collect();
        let descriptors: Vec<BorrowedFd<'_>> = regions.iter().map(|region| region.descriptor()).collect();
        let payload = message::memory_table(descriptions.len() as u32, &descriptions);
        self.tell(request::SET_MEM_TABLE, &payload, &descriptors)
    }

    /// Adds a memory region.
    ///
    /// # Errors
    /// As of [`tell`](Self::tell).
    pub fn add_memory_region(&self, region: RegionDescription, descriptor: BorrowedFd<'_>) -> Result<()> {
        self.tell(request::ADD_MEM_REG, &region.encode(), &[descriptor])
    }

    /// Removes a memory region.
    ///
    /// # Errors
    /// As of [`tell`](Self::tell).
    pub fn remove_memory_region(&self, region: RegionDescription) -> Result<()> {
        self.tell(request::REM_MEM_REG, &region.encode(), &[])
    }

    /// Creates a log of dirty pages for all of guest memory, and gives it to the device.
    ///
    /// # Errors
    /// As of [`call`](Self::call).
    pub fn set_log_base(&mut self) -> Result<()> {
        let size = self.memory.end().div_ceil(crate::memory::PAGE * 8).next_multiple_of(crate::memory::PAGE);
        let log = SharedArea::create(size)?;
        let reply = self.call(request::SET_LOG_BASE, &message::log(size, 0), &[log.descriptor()])?;
        // Devices reply with 0, without payload, or with the payload that they got.
        let value = reply.number().filter(|&value| value != size).unwrap_or(0);
        acknowledged(request::SET_LOG_BASE, value)?;
        self.log = Some(log);
        Ok(())
    }

    /// Returns the guest addresses of pages that the log has as dirty.
    pub fn dirty_pages(&self) -> Vec<u64> {
        let bytes = self.log.as_ref().map(SharedArea::bytes).unwrap_or_default();
        let bits = bytes.iter().enumerate().flat_map(|(at, byte)| {
            (0..8).filter(move |bit| byte >> bit & 1 == 1).map(move |bit| (at as u64 * 8 + bit) * crate::memory::PAGE)
        });
        bits.collect()
    }

    /// Gets a region that tracks requests in flight from the device.
    ///
    /// # Errors
    /// As of [`call`](Self::call); [`FrontEndError::Refused`] when the device has none.
    pub fn get_inflight(&mut self, queues: u16, queue_size: u16) -> Result<()> {
        let asked = InflightDescription { size: 0, offset: 0, queues, queue_size };
        let mut reply = self.call(request::GET_INFLIGHT_FD, &asked.encode(), &[])?;
        let refused = FrontEndError::Refused { request: request::GET_INFLIGHT_FD, value: 0 };
        let (Some(description), Some(file)) =
            (InflightDescription::decode(&reply.payload).filter(|found| found.size > 0), reply.descriptors.pop())
        else {
            return Err(refused);
        };
        let area = SharedArea::map(file.into(), description.offset, description.size)?;
        self.inflight = Some((InflightDescription { queues, queue_size, ..description }, area));
        Ok(())
    }

    /// Gives the device the region that tracks requests in flight.
    ///
    /// # Errors
    /// As of [`tell`](Self::tell); none is sent without a region.
    pub fn set_inflight(&self) -> Result<()> {
        let Some((description, area)) = &self.inflight else { return Ok(()) };
        self.tell(request::SET_INFLIGHT_FD, &description.encode(), &[area.descriptor()])
    }

    /// Sets the number of entries of a queue.
    ///
    /// # Errors
    /// As of [`tell`](Self::tell).
    pub fn set_vring_num(&self, queue: u32, size: u32) -> Result<()> {
        self.tell(request::SET_VRING_NUM, &message::state(queue, size), &[])
    }

    /// Sets where the device begins in a queue.
    ///
    /// # Errors
    /// As of [`tell`](Self::tell).
    pub fn set_vring_base(&self, queue: u32, base: u32) -> Result<()> {
        self.tell(request::SET_VRING_BASE, &message::state(queue, base), &[])
    }

    /// Stops a queue, and returns where the device has ended in it.
    ///
    /// # Errors
    /// As of [`call`](Self::call).
    pub fn get_vring_base(&self, queue: u32) -> Result<u32> {
        let reply = self.call(request::GET_VRING_BASE, &message::state(queue, 0), &[])?;
        match reply.state() {
            Some((index, base)) if index == queue => Ok(base),
            other => Err(FrontEndError::Violation(format!("{other:?} as base of queue {queue}"))),
        }
    }

    /// Asks the device to stop a queue, and does not wait for the reply.
    ///
    /// # Errors
    /// Of the socket.
    pub fn ask_for_vring_base(&self, queue: u32) -> Result<()> {
        self.socket.send(&message::encode(request::GET_VRING_BASE, VERSION, &message::state(queue, 0)), &[])
    }

    /// Sets the addresses of a queue.
    ///
    /// # Errors
    /// As of [`tell`](Self::tell).
    pub fn set_vring_addresses(&self, addresses: &RingAddresses) -> Result<()> {
        self.tell(request::SET_VRING_ADDR, &addresses.encode(), &[])
    }

    /// Sets a descriptor of a queue (SET_VRING_KICK, CALL or ERR), or takes it away.
    ///
    /// # Errors
    /// As of [`tell`](Self::tell).
    pub fn set_vring_event(&self, request: u32, queue: u32, event: Option<BorrowedFd<'_>>) -> Result<()> {
        let flag = if event.is_some() { 0 } else { NO_DESCRIPTOR };
        self.tell(request, &(u64::from(queue) | flag).to_ne_bytes(), event.as_slice())
    }

    /// Sets the descriptors of a queue.
    ///
    /// # Errors
    /// As of [`tell`](Self::tell).
    pub fn set_queue_events(&self, queue: usize) -> Result<()> {
        let queue = &self.queues[queue];
        let index = u32::from(queue.index);
        self.set_vring_event(request::SET_VRING_ERR, index, Some(queue.error()))?;
        self.set_vring_event(request::SET_VRING_CALL, index, queue.call())?;
        self.set_vring_event(request::SET_VRING_KICK, index, Some(queue.kick()))
    }

    /// Enables or disables a queue.
    ///
    /// # Errors
    /// As of [`tell`](Self::tell).
    pub fn set_vring_enable(&self, queue: u32, enabled: bool) -> Result<()> {
        self.tell(request::SET_VRING_ENABLE, &message::state(queue, u32::from(enabled)), &[])
    }

    /// Sends a message about a translation of I/O addresses.
    ///
    /// # Errors
    /// [`FrontEndError::Refused`] when the device refuses it.
    pub fn iotlb(&self, translation: &IotlbMessage) -> Result<()> {
        let reply = self.call(request::IOTLB_MSG, &translation.encode(), &[])?;
        acknowledged(request::IOTLB_MSG, number(&reply)?)
    }
}

fn number(reply: &FrontEndMessage) -> Result<u64> {
    let wrong = || FrontEndError::Violation(format!("reply to {} of {} bytes", reply.request, reply.payload.len()));
    reply.number().ok_or_else(wrong)
}

fn acknowledged(request: u32, value: u64) -> Result<()> {
    if value == 0 { Ok(()) } else { Err(FrontEndError::Refused { request, value }) }
}
