//! Forebay's server in this process, on volumes in memory, as the device under test.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use forebay_load::model::Model;
use forebay_reactor::{DriverChoice, Reactor, sleep};
use forebay_vhost::{VhostExport, VhostServer, VhostSocket, VhostStats};
use forebay_vhost_host::DeviceUnderTest;
use tempfile::TempDir;

/// Bytes of a device.
pub const SIZE: usize = 64 << 20;

/// Order to the thread of the server.
enum ServerOrder {
    /// Requests to the first volume wait from now on, or go on.
    Hold(bool),
    /// The first volume has another size.
    Resize(usize),
    /// The first export ends.
    Detach,
    /// The thread ends at once, and leaves everything as a killed process does.
    Crash,
    /// The server ends in an orderly way.
    Stop,
}

/// Server with two devices; it stops when dropped.
pub struct OurServer {
    folder: TempDir,
    queues: u16,
    connect: bool,
    pub stats: VhostStats,
    orders: Sender<(ServerOrder, Sender<()>)>,
    thread: Option<JoinHandle<()>>,
}

impl OurServer {
    /// Starts the server.
    pub fn start(queues: u16) -> Self {
        Self::start_in(tempfile::tempdir().expect("a folder"), queues, false)
    }

    /// Starts a server that connects to the socket of its first device.
    pub fn connecting(folder: TempDir) -> Self {
        Self::start_in(folder, 1, true)
    }

    fn start_in(folder: TempDir, queues: u16, connect: bool) -> Self {
        let (orders, taken) = channel();
        let stats = VhostStats::new();
        let mut this = Self { folder, queues, connect, stats, orders, thread: None };
        this.launch(taken);
        this
    }

    fn launch(&mut self, orders: Receiver<(ServerOrder, Sender<()>)>) {
        let sockets = [self.device(0), self.device(1)];
        let (queues, connect, stats) = (self.queues, self.connect, self.stats.clone());
        let (up, came_up) = channel();
        self.thread = Some(std::thread::spawn(move || {
            let reactor = Reactor::system(DriverChoice::Auto).expect("a driver");
            reactor.block_on(async {
                let volumes = [Model::new(SIZE, false), Model::new(SIZE, false)];
                let server = VhostServer::new(stats);
                for (index, (volume, path)) in volumes.iter().zip(sockets).enumerate() {
                    let name = format!("local/disk{index}");
                    let serial = format!("serial-{index}");
                    let export = VhostExport { name, device: volume.device(), serial, queues };
                    let socket = match connect && index == 0 {
                        true => VhostSocket::Connect { path },
                        false => VhostSocket::Listen { path, mode: 0o600, user: None, group: None },
                    };
                    server.add(export, socket).expect("the sockets are free");
                }
                up.send(()).expect("the test waits");
                serve(&server, &volumes[0], &orders).await;
            });
        }));
        came_up.recv().expect("the server comes up");
    }

    /// Returns the socket of a device.
    pub fn device(&self, device: usize) -> PathBuf {
        self.folder.path().join(format!("{device}.sock"))
    }

    fn order(&self, order: ServerOrder) {
        let (done, is_done) = channel();
        self.orders.send((order, done)).expect("the server runs");
        // A server that crashes does not reply.
        let _ = is_done.recv();
    }

    /// Lets requests to the first volume wait from now on, or go on.
    pub fn hold(&self, hold: bool) {
        self.order(ServerOrder::Hold(hold));
    }

    /// Gives the first volume another size.
    pub fn resize(&self, size: usize) {
        self.order(ServerOrder::Resize(size));
    }

    /// Ends the first export.
    pub fn detach(&self) {
        self.order(ServerOrder::Detach);
    }

    /// Ends the server as a kill does, and starts another on empty volumes.
    pub fn crash(&mut self) {
        self.order(ServerOrder::Crash);
        self.thread.take().expect("it runs").join().expect("no panic");
        let (orders, taken) = channel();
        self.orders = orders;
        self.launch(taken);
    }
}

async fn serve(server: &std::rc::Rc<VhostServer>, volume: &Model, orders: &Receiver<(ServerOrder, Sender<()>)>) {
    loop {
        match orders.try_recv() {
            Ok((ServerOrder::Hold(true), _)) => volume.hold(),
            Ok((ServerOrder::Hold(false), _)) => volume.release(),
            Ok((ServerOrder::Resize(size), _)) => volume.resize(size),
            Ok((ServerOrder::Detach, _done)) => server.detach("local/disk0").await,
            Ok((ServerOrder::Crash, _)) => return,
            Ok((ServerOrder::Stop, _done)) => return server.stop().await,
            Err(TryRecvError::Empty) => sleep(Duration::from_millis(1)).await,
            Err(TryRecvError::Disconnected) => return,
        }
    }
}

impl Drop for OurServer {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take()
            && !std::thread::panicking()
        {
            self.order(ServerOrder::Stop);
            thread.join().expect("the server did not panic");
        }
    }
}

impl DeviceUnderTest for OurServer {
    fn socket(&self) -> PathBuf {
        self.device(0)
    }

    fn other_socket(&self) -> Option<PathBuf> {
        Some(self.device(1))
    }

    fn is_alive(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }
}
