//! Device for hosts without an identity.

use std::cell::RefCell;
use std::future::ready;
use std::rc::Rc;

use crate::device::{BlockDevice, Geometry, LocalFuture, SizeWatch};
use crate::error::{Error, ErrorKind, Result};
use crate::extent::{Extent, ExtentMap};
use crate::request::{BlockReply, BlockRequest};
use crate::reservation::{ReservationAccess, ReservationView, Reservations};

/// Reservation filter for anonymous hosts: a front serves the device through it when its protocol has no reservations.
/// Its hosts cannot be told apart, so a reservation of any other host excludes them: their requests fail with
/// [`ErrorKind::Denied`].
pub struct Unnamed {
    device: Rc<dyn BlockDevice>,
    reservations: Option<RefCell<ReservationView>>,
}

impl Unnamed {
    /// Wraps any device.
    pub fn new(device: Rc<dyn BlockDevice>) -> Rc<Self> {
        let reservations = device.reservations().map(|reservations| RefCell::new(reservations.view()));
        Rc::new(Self { device, reservations })
    }

    fn allows(&self, access: ReservationAccess) -> bool {
        self.reservations.as_ref().is_none_or(|view| view.borrow_mut().allows(None, access))
    }
}

impl BlockDevice for Unnamed {
    fn geometry(&self) -> Geometry {
        self.device.geometry()
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        let access = match &request {
            // A flush neither reads nor changes data.
            BlockRequest::Flush => None,
            BlockRequest::Read(_) => Some(ReservationAccess::Read),
            _ => Some(ReservationAccess::Write),
        };
        match access {
            Some(access) if !self.allows(access) => {
                Box::pin(ready(Err(Error::new(ErrorKind::Denied, "another host has reserved the volume"))))
            }
            _ => self.device.submit(request),
        }
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        self.device.map(extent)
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        self.device.size_watch()
    }

    fn reservations(&self) -> Option<Reservations> {
        self.device.reservations()
    }
}
