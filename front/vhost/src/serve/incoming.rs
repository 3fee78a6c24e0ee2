//! Messages of a front-end as they arrive, in parts of any size.

use std::io;
use std::os::fd::OwnedFd;
use std::task::{Context, Poll};

use forebay_block::LocalFuture;
use forebay_reactor::{BufMut, Stream};

use super::connection::VhostEndReason;
use crate::session::VhostViolation;
use crate::wire::{HEADER_LEN, VhostHeader};

/// Maximum descriptors of a message: those of a table of memory.
const DESCRIPTORS_MAX: usize = 32;

/// Completed receive: number of bytes and descriptors, or the error of the socket, and the buffer with the bytes.
pub(super) type SocketReceive = (io::Result<(usize, Vec<OwnedFd>)>, BufMut);

/// Whole message.
pub(super) struct ReceivedMessage {
    pub(super) header: VhostHeader,
    pub(super) payload: BufMut,
    pub(super) descriptors: Vec<OwnedFd>,
}

/// Message that is being received.
pub(super) struct IncomingMessage {
    stream: Stream,
    /// Receive that has not completed.
    receive: Option<LocalFuture<SocketReceive>>,
    /// Receive that has completed, and was not added yet.
    received: Option<SocketReceive>,
    buf: Option<BufMut>,
    header: Option<VhostHeader>,
    descriptors: Vec<OwnedFd>,
}

impl IncomingMessage {
    /// Receives from a connection.
    pub(super) fn new(stream: Stream) -> Self {
        Self { stream, receive: None, received: None, buf: None, header: None, descriptors: Vec::new() }
    }

    /// Receives a part of the message.  Not polling any more loses nothing: the next call continues.
    pub(super) fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<SocketReceive> {
        if let Some(received) = self.received.take() {
            return Poll::Ready(received);
        }
        let mut receive = self.receive.take().unwrap_or_else(|| {
            let (stream, buf) = (self.stream.clone(), self.take_buf());
            Box::pin(async move { stream.recv_message(buf).await })
        });
        let polled = receive.as_mut().poll(cx);
        if polled.is_pending() {
            self.receive = Some(receive);
        }
        polled
    }

    /// Waits until the front-end has closed the connection, or it broke.  Bytes that arrive are kept, and what comes after
    /// them is not looked at.
    pub(super) fn poll_closed(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.received.is_none()
            && let Poll::Ready(received) = self.poll_receive(cx)
        {
            self.received = Some(received);
        }
        match &self.received {
            Some((Ok((0, _)) | Err(_), _)) => Poll::Ready(()),
            _ => Poll::Pending,
        }
    }

    /// Returns the buffer for what is still to be received of the message, and no more.
    fn take_buf(&mut self) -> BufMut {
        let len = self.header.as_ref().map_or(HEADER_LEN, |header| header.len as usize);
        self.buf.take().unwrap_or_else(|| BufMut::with_capacity(len).limited(len))
    }

    /// Adds what was received; returns the message once it is whole.
    ///
    /// # Errors
    /// Reason for which the connection ends: its front-end closed it, it broke, or the message violates the protocol.
    pub(super) fn add(&mut self, received: SocketReceive) -> Result<Option<ReceivedMessage>, VhostEndReason> {
        let (result, buf) = received;
        let (len, descriptors) = result.map_err(VhostEndReason::Socket)?;
        if len == 0 {
            let is_within = self.header.is_some() || !buf.is_empty();
            return Err(if is_within { VhostEndReason::Broken } else { VhostEndReason::Closed });
        }
        self.descriptors.extend(descriptors);
        if self.descriptors.len() > DESCRIPTORS_MAX {
            let request = self.header.map_or(0, |header| header.request);
            let found = self.descriptors.len();
            return Err(VhostViolation::Descriptors { request, found, expected: DESCRIPTORS_MAX }.into());
        }
        if buf.spare() > 0 {
            self.buf = Some(buf);
            return Ok(None);
        }
        let (header, payload) = match self.header.take() {
            Some(header) => (header, buf),
            None => {
                let bytes: &[u8; HEADER_LEN] = buf[..].try_into().expect("a whole header");
                let header = VhostHeader::parse(bytes).map_err(VhostViolation::from)?;
                if header.len > 0 {
                    self.header = Some(header);
                    return Ok(None);
                }
                (header, BufMut::with_capacity(0))
            }
        };
        Ok(Some(ReceivedMessage { header, payload, descriptors: std::mem::take(&mut self.descriptors) }))
    }
}
