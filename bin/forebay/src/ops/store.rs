//! Operations on the devices of the embedded store.

use std::rc::Rc;

use super::{HttpRoute, Operation, ProgressSink};
use crate::api;
use crate::engine::Engine;
use crate::failure::Result;

const DEVICES: &str = "/v1/store/devices";
const SCRUB: &str = "/v1/store/scrub";
const KEYS: &str = "/v1/store/keys";

/// Lists the devices of the store.
pub struct ListStoreDevices;

impl Operation for ListStoreDevices {
    type Reply = api::StoreDevices;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", DEVICES)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.store_devices()
    }
}

/// Replaces a device of the store.
pub struct ReplaceStoreDevice(pub api::ReplaceDeviceRequest);

impl Operation for ReplaceStoreDevice {
    type Reply = api::StoreDevices;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("POST", DEVICES).json(&self.0)
    }

    async fn run(self, engine: Rc<Engine>, progress: ProgressSink) -> Result<Self::Reply> {
        engine.replace_store_device(self.0, progress).await
    }
}

/// Makes the store use more of its file, device or devices.
pub struct GrowStore(pub api::GrowStoreRequest);

impl Operation for GrowStore {
    type Reply = api::StoreSpace;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("POST", "/v1/store/grow").json(&self.0)
    }

    async fn run(self, engine: Rc<Engine>, progress: ProgressSink) -> Result<Self::Reply> {
        engine.grow_store(self.0, progress).await
    }
}

/// Adds devices to the store.
pub struct AddStoreDevices(pub api::AddDevicesRequest);

impl Operation for AddStoreDevices {
    type Reply = api::StoreDevices;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("POST", format!("{DEVICES}/add")).json(&self.0)
    }

    async fn run(self, engine: Rc<Engine>, progress: ProgressSink) -> Result<Self::Reply> {
        engine.add_store_devices(self.0, progress).await
    }
}

/// Removes devices from the store.
pub struct RemoveStoreDevices(pub api::RemoveDevicesRequest);

impl Operation for RemoveStoreDevices {
    type Reply = api::StoreDevices;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("POST", format!("{DEVICES}/remove")).json(&self.0)
    }

    async fn run(self, engine: Rc<Engine>, progress: ProgressSink) -> Result<Self::Reply> {
        engine.remove_store_devices(self.0, progress).await
    }
}

/// Returns the state of the scrub of the store.
pub struct GetScrub;

impl Operation for GetScrub {
    type Reply = api::ScrubInfo;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", SCRUB)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.scrub_status()
    }
}

/// Starts a scrub of the store.
pub struct StartScrub {
    /// Set to respond only once it is complete.
    pub wait: bool,
}

impl Operation for StartScrub {
    type Reply = api::ScrubInfo;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("POST", if self.wait { format!("{SCRUB}?wait=true") } else { SCRUB.to_owned() })
    }

    async fn run(self, engine: Rc<Engine>, progress: ProgressSink) -> Result<Self::Reply> {
        engine.start_scrub(self.wait, progress).await
    }
}

/// Returns the state of the keys of encrypted images.
pub struct GetStoreKeys;

impl Operation for GetStoreKeys {
    type Reply = api::StoreKeys;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", KEYS)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.store_keys()
    }
}

/// Wraps the keys of encrypted images by another master key.
pub struct RotateMasterKey(pub api::RotateKeyRequest);

impl Operation for RotateMasterKey {
    type Reply = api::StoreKeys;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("POST", KEYS).json(&self.0)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.rotate_master_key(&self.0).await
    }
}
