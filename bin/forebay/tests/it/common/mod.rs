//! The real binary in directories of its own: a daemon, commands beside it, and a small NBD client.

use std::io::{Read, Write};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// Time limit of a step, after which a test fails.
pub const PATIENCE: Duration = Duration::from_secs(600);

/// Waits until a condition holds.
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < PATIENCE, "in vain: {what}");
        std::thread::yield_now();
    }
}

/// A command of the binary under test, with nothing of the caller's environment that it looks at.
pub fn forebay() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    for name in ["FOREBAY_DATA", "FOREBAY_CONTROL", "FOREBAY_LOG", "NOTIFY_SOCKET", "JOURNAL_STREAM"] {
        command.env_remove(name);
    }
    // No daemon of this machine is named in what it says.
    command.env("FOREBAY_RUN_DIR", "/proc/none");
    command.stdin(Stdio::null());
    command
}

/// Result of a command.
pub struct Done(pub Output);

impl Done {
    /// Asserts success; returns the output.
    pub fn ok(&self) -> String {
        assert!(self.0.status.success(), "{}: {}{}", self.0.status, self.stdout(), self.stderr());
        self.stdout()
    }

    /// Asserts success; returns the JSON output.
    pub fn json(&self) -> Value {
        let text = self.ok();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text}"))
    }

    /// Asserts failure with this exit code; returns the message.
    pub fn fails(&self, code: i32) -> String {
        assert_eq!(self.0.status.code(), Some(code), "{}{}", self.stdout(), self.stderr());
        assert!(self.stdout().is_empty(), "a failure printed to standard output: {}", self.stdout());
        self.stderr()
    }

    pub fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.0.stdout).into_owned()
    }

    pub fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.0.stderr).into_owned()
    }
}

/// A data directory with a small store, and maybe a daemon on it.
pub struct Site {
    pub dir: TempDir,
    daemon: Option<Running>,
    /// Flags of `serve`.
    flags: Vec<String>,
    /// Microseconds that every request of a volume to its image takes longer.
    pub delay_us: Option<u64>,
}

impl Drop for Site {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the daemon's log:\n{}", self.log());
        }
    }
}

struct Running {
    child: Child,
}

impl Drop for Running {
    fn drop(&mut self) {
        // What has ended cannot be killed; it is waited for all the same.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Site {
    /// A directory; the store is made by the first daemon.
    pub fn new() -> Self {
        Self { dir: tempfile::tempdir().expect("a directory"), daemon: None, flags: Vec::new(), delay_us: None }
    }

    /// With a daemon.
    pub fn serving(flags: &[&str]) -> Self {
        let mut site = Self::new();
        site.start_with_flags(flags);
        site
    }

    /// With a store and no daemon.
    pub fn with_store() -> Self {
        let site = Self::new();
        site.run(&["store", "init", "--size", "160M"]).ok();
        site
    }

    /// In both ways, for what must work in both.
    pub fn each() -> [(&'static str, Self); 2] {
        [("daemon", Self::serving(&[])), ("direct", Self::with_store())]
    }

    pub fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The log of the daemon that runs, or ran last.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Starts a daemon and waits until it says that it is ready.
    pub fn start(&mut self) {
        let log = std::fs::File::create(self.path("log")).expect("a log");
        self.start_logging_to(log);
    }

    /// The same, with flags from now on.
    pub fn start_with_flags(&mut self, flags: &[&str]) {
        self.flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
        self.start();
    }

    /// The same, with flags, its standard error somewhere else.
    pub fn start_with(&mut self, flags: &[&str], stderr: impl Into<Stdio>) {
        self.flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
        self.start_logging_to(stderr);
    }

    fn start_logging_to(&mut self, stderr: impl Into<Stdio>) {
        let notify = self.path("notify");
        let _ = std::fs::remove_file(&notify);
        let listener = UnixDatagram::bind(&notify).expect("a socket");
        listener.set_read_timeout(Some(Duration::from_millis(200))).expect("a timeout");
        let mut command = forebay();
        command.args(["serve", "--store-size", "160M", "--data"]).arg(self.data()).args(&self.flags);
        command.env("FOREBAY_RUN_DIR", self.path("run"));
        command.env("NOTIFY_SOCKET", &notify).stderr(stderr).stdout(Stdio::null());
        command.envs(self.delay_us.map(|pause| ("FOREBAY_DEBUG_BACKEND_DELAY_US", pause.to_string())));
        let mut running = Running { child: command.spawn().expect("the daemon") };
        let started = Instant::now();
        let mut buf = [0; 256];
        loop {
            match listener.recv(&mut buf) {
                Ok(len) if buf[..len].starts_with(b"READY=1\n") => break,
                Ok(_) => {}
                Err(_) => {
                    let ended = running.child.try_wait().expect("the daemon's state");
                    assert!(ended.is_none(), "the daemon ended with {ended:?}:\n{}", self.log());
                    assert!(started.elapsed() < PATIENCE, "the daemon is not ready:\n{}", self.log());
                }
            }
        }
        self.daemon = Some(running);
    }

    pub fn pid(&self) -> u32 {
        self.daemon.as_ref().expect("a daemon").child.id()
    }

    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").arg(format!("-{name}")).arg(self.pid().to_string()).status();
        assert!(sent.expect("kill").success());
    }

    /// Waits until the daemon has ended.
    pub fn wait(&mut self) -> ExitStatus {
        let mut running = self.daemon.take().expect("a daemon");
        let started = Instant::now();
        loop {
            if let Some(status) = running.child.try_wait().expect("the daemon's state") {
                return status;
            }
            assert!(started.elapsed() < PATIENCE, "the daemon does not end:\n{}", self.log());
            std::thread::yield_now();
        }
    }

    /// Stops the daemon in order.
    pub fn stop(&mut self) {
        self.signal("TERM");
        let status = self.wait();
        assert!(status.success(), "the daemon ended with {status}:\n{}", self.log());
    }

    /// Ends the daemon as a power failure of its process would.
    pub fn kill(&mut self) {
        self.signal("KILL");
        assert_eq!(self.wait().signal(), Some(9));
    }

    /// A command on this data directory.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = forebay();
        command.args(args).arg("--data").arg(self.data()).current_dir(self.dir.path());
        command.env("FOREBAY_RUN_DIR", self.path("run"));
        command
    }

    /// Runs a command to its end.
    pub fn run(&self, args: &[&str]) -> Done {
        Done(self.command(args).output().expect("the command"))
    }

    /// Runs a command with JSON as its output.
    pub fn json(&self, args: &[&str]) -> Value {
        let args: Vec<&str> = args.iter().copied().chain(["--format", "json"]).collect();
        self.run(&args).json()
    }

    /// Runs a command with bytes at its standard input.
    pub fn run_with_input(&self, args: &[&str], input: &[u8]) -> Done {
        let mut command = self.command(args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the command");
        let mut stdin = child.stdin.take().expect("its input");
        std::thread::scope(|scope| {
            // A command that fails early does not read everything.
            scope.spawn(move || drop(stdin.write_all(input)));
            Done(child.wait_with_output().expect("the command"))
        })
    }

    /// An image's content.
    pub fn export(&self, image: &str) -> Vec<u8> {
        let done = self.run(&["export", image, "-"]);
        assert!(done.0.status.success(), "{}", done.stderr());
        done.0.stdout
    }

    /// A request to the control socket; status and body.
    pub fn http(&self, request: &str) -> (u16, String) {
        let stream = UnixStream::connect(self.data().join("control.sock")).expect("the control socket");
        http(stream, request)
    }
}

/// Says that a test cannot run on this machine: mounts and loop devices take root, others a tool.  With
/// [`MOUNTS_REQUIRED`] in the environment that is a failure instead: a run that must not pass with such tests left out.
pub fn skip(why: &str) {
    let test = std::thread::current().name().unwrap_or("?").to_owned();
    assert!(std::env::var_os(MOUNTS_REQUIRED).is_none(), "{test} cannot run here: {why}");
    // Past the capture of the test harness, which would keep it from everybody.
    let _ = writeln!(std::io::stderr(), "\nSKIPPED {test}: {}", why.replace('\n', " "));
}

/// Set where tests that mount file systems must run.
const MOUNTS_REQUIRED: &str = "FOREBAY_TEST_MOUNTS_REQUIRED";

/// Loop device over a file, detached at the end of the test.
pub struct LoopDevice {
    path: PathBuf,
}

impl LoopDevice {
    /// Attaches the file `image`, which is made with so many bytes; says so and returns `None` where that is not allowed.
    pub fn new(image: &Path, size: u64) -> Option<Self> {
        std::fs::File::create(image).and_then(|file| file.set_len(size)).expect("an image");
        match Command::new("losetup").args(["--find", "--show"]).arg(image).output() {
            Ok(done) if done.status.success() => {
                Some(Self { path: String::from_utf8_lossy(&done.stdout).trim().to_owned().into() })
            }
            other => {
                skip(&format!("no loop device can be made (root is needed): {other:?}"));
                None
            }
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
    }
}

/// A small file system of its own, unmounted at the end of the test, also of one that fails.
pub struct Mount {
    path: PathBuf,
}

impl Mount {
    /// Mounts a tmpfs of so many bytes (`16k`); says so and returns `None` where mounting is not allowed.
    pub fn tmpfs(path: &Path, size: &str) -> Option<Self> {
        Self::of(path, &["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"])
    }

    /// Mounts an ext4 file system in the file `image`, which is made with so many bytes.
    pub fn ext4(path: &Path, image: &Path, size: u64) -> Option<Self> {
        std::fs::File::create(image).and_then(|file| file.set_len(size)).expect("an image");
        let made = Command::new("mkfs.ext4").args(["-q", "-F", "-m", "0"]).arg(image).status();
        if !made.is_ok_and(|status| status.success()) {
            skip("mkfs.ext4 is not there");
            return None;
        }
        Self::of(path, &["-o", "loop", image.to_str().expect("a path")])
    }

    fn of(path: &Path, args: &[&str]) -> Option<Self> {
        std::fs::create_dir_all(path).expect("a directory");
        let done = Command::new("mount").args(args).arg(path).output();
        if !done.as_ref().is_ok_and(|done| done.status.success()) {
            skip(&format!("{} cannot be mounted (root is needed): {done:?}", path.display()));
            return None;
        }
        Some(Self { path: path.to_owned() })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // What is still open there goes with its last user.
        let _ = Command::new("umount").arg("-l").arg(&self.path).status();
    }
}

/// Sends a request (`GET /path`, then more head lines) and reads the answer to its end.
pub fn http(mut stream: impl Read + Write, request: &str) -> (u16, String) {
    let (first, more) = request.split_once('\n').unwrap_or((request, ""));
    let more: String = more.lines().map(|line| format!("{line}\r\n")).collect();
    let head = format!("{first} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{more}\r\n");
    stream.write_all(head.as_bytes()).expect("sent");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("an answer");
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let status = answer.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status");
    let body = answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default();
    (status, body)
}

/// Bytes that no two places share, with runs of zeroes: `seed` tells them apart.
pub fn content(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = vec![0; len];
    for (at, block) in out.chunks_mut(4096).enumerate() {
        // Every third block stays zero, and so do long runs.
        if at % 3 == 2 || (at / 512) % 4 == 3 {
            continue;
        }
        for word in block.chunks_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
        }
    }
    out
}

/// The types of a JSON value, to compare its shape: objects by key, arrays by their first element.
pub fn shape(value: &Value) -> Value {
    match value {
        Value::Object(map) => Value::Object(map.iter().map(|(key, value)| (key.clone(), shape(value))).collect()),
        Value::Array(list) => Value::Array(list.first().map(shape).into_iter().collect()),
        Value::String(_) => "string".into(),
        Value::Number(_) => "number".into(),
        Value::Bool(_) => "bool".into(),
        Value::Null => "null".into(),
    }
}

/// A client of the NBD protocol, as much of it as tests need.
pub struct Nbd {
    stream: UnixStream,
    cookie: u64,
    /// Bytes of the export.
    pub size: u64,
}

impl Nbd {
    /// Connects to an export at a Unix socket; the server's error number if it refuses.
    pub fn connect(socket: &Path, export: &str) -> Result<Self, u32> {
        let mut stream = UnixStream::connect(socket).expect("the NBD socket");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).expect("a greeting");
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        // Fixed newstyle, no zeroes; then NBD_OPT_GO for the name, with no information requests.
        let mut hello = 3u32.to_be_bytes().to_vec();
        hello.extend_from_slice(b"IHAVEOPT");
        hello.extend_from_slice(&7u32.to_be_bytes());
        hello.extend_from_slice(&(export.len() as u32 + 6).to_be_bytes());
        hello.extend_from_slice(&(export.len() as u32).to_be_bytes());
        hello.extend_from_slice(export.as_bytes());
        hello.extend_from_slice(&[0, 0]);
        stream.write_all(&hello).expect("sent");
        let mut size = 0;
        loop {
            let mut head = [0; 20];
            stream.read_exact(&mut head).expect("a reply");
            let number = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().expect("four bytes"));
            let mut data = vec![0; number(16) as usize];
            stream.read_exact(&mut data).expect("its data");
            match number(12) {
                1 => return Ok(Self { stream, cookie: 0, size }),
                3 if data[..2] == [0, 0] => size = u64::from_be_bytes(data[2..10].try_into().expect("a size")),
                3 => {}
                error => return Err(error),
            }
        }
    }

    /// One request; the error number, and what was read.
    fn request(&mut self, kind: u16, offset: u64, len: u32, payload: &[u8], answer: usize) -> (u32, Vec<u8>) {
        self.cookie += 1;
        let mut request = 0x2560_9513u32.to_be_bytes().to_vec();
        request.extend_from_slice(&0u16.to_be_bytes());
        request.extend_from_slice(&kind.to_be_bytes());
        request.extend_from_slice(&self.cookie.to_be_bytes());
        request.extend_from_slice(&offset.to_be_bytes());
        request.extend_from_slice(&len.to_be_bytes());
        request.extend_from_slice(payload);
        self.stream.write_all(&request).expect("sent");
        let mut head = [0; 16];
        self.stream.read_exact(&mut head).expect("a reply");
        assert_eq!(head[..4], 0x6744_6698u32.to_be_bytes());
        assert_eq!(head[8..], self.cookie.to_be_bytes());
        let error = u32::from_be_bytes(head[4..8].try_into().expect("four bytes"));
        let mut data = vec![0; if error == 0 { answer } else { 0 }];
        self.stream.read_exact(&mut data).expect("its data");
        (error, data)
    }

    /// The server has ended the connection, with nothing more to say.
    pub fn ends(mut self) -> bool {
        match self.stream.read(&mut [0; 1]) {
            Ok(len) => len == 0,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }

    pub fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        let (error, data) = self.request(0, offset, len as u32, &[], len);
        assert_eq!(error, 0, "a read of {len} at {offset}");
        data
    }

    pub fn try_write(&mut self, offset: u64, data: &[u8]) -> u32 {
        self.request(1, offset, data.len() as u32, data, 0).0
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) {
        assert_eq!(self.try_write(offset, data), 0, "a write of {} at {offset}", data.len());
    }

    pub fn flush(&mut self) {
        assert_eq!(self.request(3, 0, 0, &[], 0).0, 0, "a flush");
    }
}
