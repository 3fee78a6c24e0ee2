//! The kernel's NVMe/TCP initiator, in a guest with its own kernel, against a daemon on this machine.
//!
//! The guest's script asks for what has to happen here through files in a shared folder: it writes `ask`, a word a line,
//! and waits for `answer`, whose first line is 0 or 1.  It can ask for `forebay WORDS...`, `restart` or `kill` (and start)
//! the daemon, and `cut` or `mend` the way to its second port.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use anyhow::{Context, Result, bail};

use crate::ceph::Cluster;
use crate::daemon::{self, Daemon};
use crate::shell::{self, Scratch};

/// Serves a volume by two ports and runs test/interop/guest-nvme.sh in the guest.
pub fn run() -> Result<()> {
    shell::build(&mut daemon::build_command())?;
    let scratch = Scratch::within(&shell::target(), "guest")?;
    let (first, second) = (shell::free_port()?, shell::free_port()?);
    let way = Way::open(second)?;
    let config = scratch.path().join("config.toml");
    let advertise = format!("'10.0.2.2:{first}', '10.0.2.2:{}'", way.port);
    fs::write(&config, format!("[nvme-subsystem]\nadvertise = [{advertise}]\n"))?;
    let addrs = [format!("127.0.0.1:{first}"), format!("127.0.0.1:{second}")];
    let config = config.display().to_string();
    let words = ["--config", &config, "--nvme", &addrs[0], "--nvme", &addrs[1], "--cores", "2"];
    let daemon = Daemon::start(&scratch.path().join("store"), &words)?;
    shell::output(daemon.command().args(["create", "local/guest", "--size", "320M"]))?;
    shell::output(daemon.command().args(["attach", "local/guest", "--nvme"]))?;

    let share = scratch.path().join("share");
    fs::create_dir(&share)?;
    let mut guest = shell::command(shell::root().join("test/lab/guest"));
    guest.arg(shell::root().join("test/interop/guest-nvme.sh")).arg(first.to_string());
    guest.env("SHARE", &share).env("TIMEOUT", "420");
    super::converse(&mut guest, &scratch, &share, daemon, |words, daemon| serve(words, daemon, &way))
}

/// Serves a volume to hosts that authenticate and runs test/interop/guest-nvme-auth.sh in a guest with a kernel that can.
pub fn auth() -> Result<()> {
    shell::build(&mut daemon::build_command())?;
    let scratch = Scratch::within(&shell::target(), "guest")?;
    let keys = scratch.path().join("keys");
    fs::create_dir(&keys)?;
    for name in ["one", "two", "three", "wrong", "controller"] {
        let nqn = format!("nqn.2014-08.org.example:{name}");
        let hash = if name == "two" { "--hmac=2" } else { "--hmac=0" };
        let key = shell::output(shell::command("nvme").args(["gen-dhchap-key", hash, "--nqn", &nqn]))?;
        let path = keys.join(format!("{name}.key"));
        fs::write(&path, key.trim())?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        fs::write(keys.join(format!("{name}.nqn")), nqn)?;
    }
    let subsystem = "nqn.2014-08.org.example:authenticated";
    let path = |name: &str| keys.join(name).display().to_string();
    let config = scratch.path().join("config.toml");
    let text = format!(
        "[nvme-subsystem]\nnqn = '{subsystem}'\n[[nvme-subsystem.host]]\nnqn = 'nqn.2014-08.org.example:three'\n\
         secret = '{}'\nhashes = ['sha512']\ngroups = ['ffdhe4096']\n",
        path("three.key")
    );
    fs::write(&config, text)?;
    let port = shell::free_port()?;
    let (config, addr) = (config.display().to_string(), format!("127.0.0.1:{port}"));
    let one = format!("nqn.2014-08.org.example:one,secret={}", path("one.key"));
    let two =
        format!("nqn.2014-08.org.example:two,secret={},controller-secret={}", path("two.key"), path("controller.key"));
    let words = ["--config", &config, "--nvme", &addr, "--nvme-host", &one, "--nvme-host", &two];
    let daemon = Daemon::start(&scratch.path().join("store"), &words)?;
    shell::output(daemon.command().args(["create", "local/guest", "--size", "64M"]))?;
    shell::output(daemon.command().args(["attach", "local/guest", "--nvme"]))?;
    let share = scratch.path().join("share");
    fs::create_dir(&share)?;
    let mut guest = shell::command(shell::root().join("test/lab/guest"));
    guest.arg(shell::root().join("test/interop/guest-nvme-auth.sh")).args([&port.to_string(), subsystem]).arg(&keys);
    guest.env("KERNEL", "backports").env("SHARE", &share).env("TIMEOUT", "300");
    super::converse(&mut guest, &scratch, &share, daemon, super::serve)
}

/// Serves a volume through TLS and runs test/interop/guest-nvme-tls.sh in a guest with a kernel that speaks it.
pub fn tls() -> Result<()> {
    shell::build(&mut daemon::build_command())?;
    let scratch = Scratch::within(&shell::target(), "guest")?;
    let keys = scratch.path().join("keys");
    fs::create_dir(&keys)?;
    for name in ["one", "two", "wrong"] {
        // Not SHA-384: GnuTLS, which makes tlshd's handshakes, proves all keys with SHA-256 (oracle/ktls-utils#86).
        let key = shell::output(shell::command("nvme").args(["gen-tls-key", "--hmac=1"]))?;
        let path = keys.join(format!("{name}.tls"));
        fs::write(&path, key.trim())?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        fs::write(keys.join(format!("{name}.nqn")), format!("nqn.2014-08.org.example:{name}"))?;
    }
    let subsystem = "nqn.2014-08.org.example:sealed";
    let config = scratch.path().join("config.toml");
    fs::write(&config, format!("[nvme-subsystem]\nnqn = '{subsystem}'\n"))?;
    let (sealed, plain) = (shell::free_port()?, shell::free_port()?);
    let config = config.display().to_string();
    let addrs = [format!("127.0.0.1:{sealed},tls=required"), format!("127.0.0.1:{plain}")];
    let host = |name: &str| format!("nqn.2014-08.org.example:{name},tls-key={}/{name}.tls", keys.display());
    let hosts = [host("one"), host("two")];
    let words = ["--config", &config, "--nvme", &addrs[0], "--nvme", &addrs[1]];
    let words = [&words[..], &["--nvme-host", &hosts[0], "--nvme-host", &hosts[1]]].concat();
    let daemon = Daemon::start(&scratch.path().join("store"), &words)?;
    shell::output(daemon.command().args(["create", "local/guest", "--size", "64M"]))?;
    shell::output(daemon.command().args(["attach", "local/guest", "--nvme"]))?;
    let share = scratch.path().join("share");
    fs::create_dir(&share)?;
    let mut guest = shell::command(shell::root().join("test/lab/guest"));
    guest.arg(shell::root().join("test/interop/guest-nvme-tls.sh"));
    guest.args([&sealed.to_string(), &plain.to_string(), subsystem]).arg(&keys);
    guest.env("KERNEL", "backports").env("TLS", "1").env("SHARE", &share).env("TIMEOUT", "300");
    super::converse(&mut guest, &scratch, &share, daemon, super::serve)
}

/// Serves an image of a Ceph cluster by two daemons and runs test/interop/guest-nvme-two.sh in the guest.
pub fn two() -> Result<()> {
    shell::build(&mut daemon::build_command())?;
    let cluster = Cluster::start(3)?;
    let scratch = Scratch::within(&shell::target(), "guest")?;
    let nqn = "nqn.2014-08.org.example:two-daemons";
    let uuid = "6f1a3b52-0000-4000-8000-5d7c21f0a001";
    let start = |name: &str, controllers: (u16, u16), state: &str| -> Result<(Daemon, u16)> {
        let config = scratch.path().join(format!("{name}.toml"));
        let (first, last) = controllers;
        let text = format!("[nvme-subsystem]\nnqn = '{nqn}'\nfirst-controller = {first}\nlast-controller = {last}\n");
        fs::write(&config, text)?;
        let (port, config) = (shell::free_port()?, config.display().to_string());
        let addr = format!("127.0.0.1:{port}");
        let words = ["--config", &config, "--nvme", &addr, "--store-size", "256M"];
        let wrapper = ["/usr/bin/env", &cluster.variable()];
        let daemon = Daemon::start_under(&wrapper, &scratch.path().join(name), &words)?;
        shell::output(daemon.command().args(["ana", "set", state]))?;
        if name == "first" {
            shell::output(daemon.command().args(["create", "rbd/two", "--size", "64M"]))?;
        }
        shell::output(daemon.command().args(["attach", "rbd/two", "--nvme", "--nsid", "1", "--uuid", uuid]))?;
        Ok((daemon, port))
    };
    let (first, first_port) = start("first", (1, 1000), "optimized")?;
    let (second, second_port) = start("second", (1001, 2000), "inaccessible")?;
    let share = scratch.path().join("share");
    fs::create_dir(&share)?;
    let mut guest = shell::command(shell::root().join("test/lab/guest"));
    guest.arg(shell::root().join("test/interop/guest-nvme-two.sh"));
    guest.args([&first_port.to_string(), &second_port.to_string(), nqn]);
    guest.env("SHARE", &share).env("TIMEOUT", "420");
    let mut first = Some(first);
    super::converse(&mut guest, &scratch, &share, second, |words, second| match words {
        ["first", "kill"] => {
            first.take().context("it does not run")?.crash()?;
            Ok(String::new())
        }
        ["first", words @ ..] => super::serve(words, &mut first),
        ["second", words @ ..] => super::serve(words, second),
        words => bail!("the guest asks for {words:?}"),
    })
}

/// Does what the guest has asked for.
fn serve(words: &[&str], daemon: &mut Option<Daemon>, way: &Way) -> Result<String> {
    match words {
        ["cut"] => {
            way.cut(true);
            Ok(String::new())
        }
        ["mend"] => {
            way.cut(false);
            Ok(String::new())
        }
        words => super::serve(words, daemon),
    }
}

/// A way to a port of this machine that can be cut.
struct Way {
    port: u16,
    is_cut: Arc<AtomicBool>,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl Way {
    fn open(to: u16) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let way =
            Self { port: listener.local_addr()?.port(), is_cut: Arc::default(), open: Arc::new(Mutex::default()) };
        let (is_cut, open) = (way.is_cut.clone(), way.open.clone());
        // Ends with the process.
        thread::spawn(move || {
            for host in listener.incoming().flatten() {
                if is_cut.load(Ordering::SeqCst) {
                    continue;
                }
                let Ok(daemon) = TcpStream::connect(("127.0.0.1", to)) else { continue };
                let _ = (host.set_nodelay(true), daemon.set_nodelay(true));
                if let Err(error) = carry(host, daemon, &open) {
                    eprintln!("the way to the second port: {error}");
                }
            }
        });
        Ok(way)
    }

    /// Cuts it, which ends every connection, or mends it.
    fn cut(&self, cut: bool) {
        self.is_cut.store(cut, Ordering::SeqCst);
        if cut {
            for stream in self.open.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }
}

/// Carries bytes both ways until one side ends.
fn carry(host: TcpStream, daemon: TcpStream, open: &Mutex<Vec<TcpStream>>) -> std::io::Result<()> {
    open.lock().unwrap_or_else(PoisonError::into_inner).push(host.try_clone()?);
    for (mut from, mut to) in [(host.try_clone()?, daemon.try_clone()?), (daemon, host)] {
        thread::spawn(move || {
            let mut buffer = vec![0; 64 << 10];
            while let Ok(got @ 1..) = from.read(&mut buffer) {
                if to.write_all(&buffer[..got]).is_err() {
                    break;
                }
            }
            let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
        });
    }
    Ok(())
}
