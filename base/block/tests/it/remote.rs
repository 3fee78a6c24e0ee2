//! Tests of a block device used from other cores.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, Buf, BufList, DeviceHandle, Error, ErrorKind, Extent, ExtentMap,
    ExtentState, Geometry, LocalFuture, Result, SizeWatch,
};
use forebay_reactor::{CoreHandle, Cores, CoresOptions, DriverChoice, Reactor, spawn, yield_now};

/// Device in memory; every second request takes a few turns.
struct Memory {
    bytes: Rc<RefCell<Vec<u8>>>,
    requests: Cell<u32>,
    watch: Rc<SizeWatch>,
    /// Address of the last written data.
    address: Cell<usize>,
}

impl Memory {
    fn new(size: usize) -> Rc<Self> {
        let bytes = Rc::new(RefCell::new(vec![0; size]));
        Rc::new(Self { bytes, requests: Cell::new(0), watch: Rc::default(), address: Cell::new(0) })
    }

    fn resize(&self, size: usize) {
        self.bytes.borrow_mut().resize(size, 0);
        self.watch.announce();
    }
}

impl BlockDevice for Memory {
    fn geometry(&self) -> Geometry {
        let size = self.bytes.borrow().len() as u64;
        Geometry { size, block_size: 1, preferred_io: 4096, transfer_max: 1 << 20, read_only: false }
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        let slow = self.requests.replace(self.requests.get() + 1).is_multiple_of(2);
        let bytes = self.bytes.clone();
        if let BlockRequest::Write { data, .. } = &request {
            self.address.set(data.parts().first().map_or(0, |part| part.as_ptr() as usize));
        }
        Box::pin(async move {
            if slow {
                yield_now().await;
                yield_now().await;
            }
            let mut bytes = bytes.borrow_mut();
            match request {
                BlockRequest::Read(extent) => {
                    let range = extent.offset as usize..extent.end() as usize;
                    let part = bytes.get(range).ok_or(Error::new(ErrorKind::OutOfRange, "read"))?;
                    Ok(BlockReply::Data(Buf::copy_of(part).into()))
                }
                BlockRequest::Write { offset, data, .. } => {
                    let range = offset as usize..offset as usize + data.len();
                    let part = bytes.get_mut(range).ok_or(Error::new(ErrorKind::OutOfRange, "write"))?;
                    data.copy_to(part);
                    Ok(BlockReply::Done)
                }
                _ => Err(Error::new(ErrorKind::Unsupported, "request")),
            }
        })
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        Box::pin(async move {
            let mut map = ExtentMap::new();
            map.push(extent.offset, extent.len, ExtentState::Data);
            Ok(map)
        })
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        Some(self.watch.clone())
    }
}

fn write(offset: u64, data: impl Into<BufList>) -> BlockRequest {
    BlockRequest::Write { offset, data: data.into(), fua: false }
}

fn cores(count: usize) -> Cores {
    Cores::start(&CoresOptions { count, ..CoresOptions::default() }).expect("cores")
}

fn block_on<F: Future>(future: F) -> F::Output {
    Reactor::system(DriverChoice::Auto).expect("a driver").block_on(future)
}

#[test]
fn requests_travel_and_replies_come_back() {
    let cores = cores(2);
    block_on(async {
        let device = Memory::new(1 << 20);
        let handle = DeviceHandle::new(device.clone());
        let workers: Vec<_> = (0..2u8)
            .map(|core| {
                let handle = handle.clone();
                cores.handle(core.into()).run(move || async move {
                    let device = handle.attach();
                    assert_eq!((device.geometry().size, device.geometry().preferred_io), (1 << 20, 4096));
                    let base = u64::from(core) * (512 << 10);
                    let tasks: Vec<_> = (0..64u64)
                        .map(|block| {
                            let device = device.clone();
                            spawn(async move {
                                let data = Buf::copy_of(&[core ^ block as u8; 4096]);
                                let at = base + 4096 * block;
                                device.submit(write(at, data.clone())).await.expect("writes");
                                let read =
                                    device.submit(BlockRequest::Read(Extent::new(at, 4096))).await.expect("reads");
                                assert!(read.into_data() == data[..]);
                            })
                        })
                        .collect();
                    for task in tasks {
                        task.await;
                    }
                    let map = device.map(Extent::new(0, 4096)).await.expect("maps");
                    assert_eq!(map.data_bytes(), 4096);
                    let error = device.submit(BlockRequest::Flush).await.expect_err("not offered");
                    assert_eq!(error.kind(), ErrorKind::Unsupported);
                    let past = BlockRequest::Read(Extent::new(1 << 20, 1));
                    assert_eq!(device.submit(past).await.expect_err("past the end").kind(), ErrorKind::OutOfRange);
                })
            })
            .collect();
        for worker in workers {
            worker.await.expect("the core is there");
        }
    });
}

#[test]
fn buffers_are_handed_over() {
    let cores = cores(1);
    block_on(async {
        let device = Memory::new(8192);
        let handle = DeviceHandle::new(device.clone());
        let address = cores
            .handle(0)
            .run(move || async move {
                let data = Buf::copy_of(&[7; 4096]);
                let address = data.as_ptr() as usize;
                handle.attach().submit(write(0, data)).await.expect("writes");
                address
            })
            .await;
        assert_eq!(address, Ok(device.address.get()));
    });
}

#[test]
fn a_request_goes_on_when_nobody_waits() {
    let cores = cores(1);
    block_on(async {
        let device = Memory::new(8192);
        let handle = DeviceHandle::new(device.clone());
        let dropped = cores.handle(0).run(move || async move {
            let device = handle.attach();
            drop(device.submit(write(0, Buf::copy_of(b"one"))));
            drop(device.submit(write(3, Buf::copy_of(b"two"))));
        });
        dropped.await.expect("the core is there");
        while &device.bytes.borrow()[..6] != b"onetwo" {
            yield_now().await;
        }
    });
}

#[test]
fn the_size_is_followed() {
    let cores = cores(1);
    block_on(async {
        let device = Memory::new(4096);
        let handle = DeviceHandle::new(device.clone());
        let owner = CoreHandle::current();
        let (tell, mut told) = forebay_reactor::cross::channel();
        let watching = cores.handle(0).run(move || async move {
            let device = handle.attach();
            let watch = device.size_watch().expect("it can change");
            let mut size = device.geometry().size;
            let changed = watch.changed();
            tell.send(size).expect("somebody listens");
            // The awaited change may come before the first poll.
            if device.geometry().size == size {
                changed.await;
            }
            size = device.geometry().size;
            tell.send(size).expect("somebody listens");
            assert!(!owner.is_gone());
        });
        assert_eq!(told.recv().await, Some(4096));
        device.resize(12_288);
        assert_eq!(told.recv().await, Some(12_288));
        watching.await.expect("the core is there");
    });
}

#[test]
fn the_device_is_let_go_of_with_its_last_user() {
    let cores = cores(1);
    block_on(async {
        let device = Memory::new(4096);
        let handle = DeviceHandle::new(device.clone());
        let used = cores.handle(0).run(move || async move {
            let device = handle.attach();
            drop(handle);
            device.submit(write(0, Buf::copy_of(b"x"))).await.expect("writes");
        });
        used.await.expect("the core is there");
        while Rc::strong_count(&device) > 1 {
            yield_now().await;
        }
    });
}

#[test]
fn a_stopped_owner_fails_requests() {
    let owner = cores(1);
    block_on(async {
        let handle = owner.handle(0).run(|| async { DeviceHandle::new(Memory::new(4096)) }).await.expect("runs");
        let device = handle.attach();
        device.submit(write(0, Buf::copy_of(b"x"))).await.expect("writes");
        owner.stop().expect("no panic");
        let error = device.submit(write(0, Buf::copy_of(b"x"))).await.expect_err("the owner is gone");
        assert_eq!(error.kind(), ErrorKind::ShuttingDown);
        assert_eq!(device.geometry().size, 4096);
    });
}
