//! Tests of memory that another process may truncate.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_reactor::{BufMut, GuardedMapping};

const PAGE: usize = 4096;
/// Environment variable that tells a child process which case to run.
const CASE: &str = "FOREBAY_SIGBUS_CASE";
/// Exit status of a child whose own handler was called.
const HANDLED: i32 = 42;

/// Returns a memory file of `len` bytes, which may be truncated.
fn memory_file(len: u64, flags: libc::c_uint) -> io::Result<File> {
    // SAFETY: the name is a C string.
    let fd = unsafe { libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC | flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just opened, with no other owner.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(len)?;
    Ok(file)
}

fn filled_file(len: usize) -> File {
    let file = memory_file(len as u64, 0).expect("a memory file");
    let bytes: Vec<u8> = (0..len).map(pattern).collect();
    std::os::unix::fs::FileExt::write_all_at(&file, &bytes, 0).expect("written");
    file
}

fn pattern(at: usize) -> u8 {
    (at % 251) as u8 | 1
}

fn bytes(mapping: &GuardedMapping, at: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xEE; len];
    mapping.read(at, &mut bytes);
    bytes
}

#[test]
fn bytes_are_those_of_the_file() {
    let file = filled_file(5 * PAGE);
    for (offset, len) in [(0, 5 * PAGE), (PAGE, PAGE), (123, 4567), (PAGE + 1, 1), (5 * PAGE - 1, 1)] {
        let mapping = GuardedMapping::map(file.as_fd(), offset as u64, len as u64).expect("mapped");
        assert_eq!((mapping.len(), mapping.is_empty(), mapping.is_lost()), (len, false, false));
        assert!(bytes(&mapping, 0, len).iter().enumerate().all(|(at, byte)| *byte == pattern(offset + at)));
    }
    let mapping = GuardedMapping::map(file.as_fd(), 100, 1000).expect("mapped");
    for len in [0, 1, 2, 3, 4, 8, 15, 16, 17, 100] {
        let new: Vec<u8> = (0..len).map(|at| 200 + (at % 50) as u8).collect();
        mapping.write(len, &new);
        let mut read = vec![0; len];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut read, 100 + len as u64).expect("read");
        assert_eq!(read, new);
        assert_eq!(bytes(&mapping, len, len), new);
    }
    mapping.fill_zero(500, 20);
    assert_eq!(
        bytes(&mapping, 499, 22),
        [pattern(599)].into_iter().chain([0; 20]).chain([pattern(620)]).collect::<Vec<_>>()
    );
    let mut buf = BufMut::copy_of(b"before").freeze().to_vec();
    buf.extend(bytes(&mapping, 900, 3));
    let mut appended = BufMut::with_capacity(9);
    appended.extend_from_slice(b"before");
    mapping.read_into(900, 3, &mut appended);
    assert_eq!(appended[..], buf[..]);
}

#[test]
fn integers_are_atomic_and_native() {
    let (mapping, fd) = GuardedMapping::create(PAGE as u64).expect("created");
    let other = GuardedMapping::map(fd.as_fd(), 0, PAGE as u64).expect("mapped");
    mapping.store_u16(2, 0x1234, Ordering::Release);
    mapping.store_u32(4, 0x1234_5678, Ordering::Release);
    mapping.store_u64(8, 0x1234_5678_9abc_def0, Ordering::Release);
    assert_eq!(other.load_u16(2, Ordering::Acquire), 0x1234);
    assert_eq!(other.load_u32(4, Ordering::Acquire), 0x1234_5678);
    assert_eq!(other.load_u64(8, Ordering::Acquire), 0x1234_5678_9abc_def0);
    assert_eq!(bytes(&other, 2, 2), 0x1234u16.to_ne_bytes());
    assert_eq!(other.or_u8(16, 5, Ordering::Relaxed), 0);
    assert_eq!(mapping.or_u8(16, 2, Ordering::Relaxed), 5);
    assert_eq!(bytes(&mapping, 16, 1), [7]);
    // Sealed: neither side can shrink or grow it.
    let file = File::from(fd);
    assert!(file.set_len(0).is_err());
    assert!(file.set_len(2 * PAGE as u64).is_err());
    assert!(!mapping.is_lost());
}

#[test]
fn wrong_ranges_are_refused() {
    let file = filled_file(2 * PAGE);
    let long = 2 * PAGE as u64;
    for (offset, len) in
        [(0, 0), (0, long + 1), (long, 1), (1, long), (u64::MAX, 1), (1, u64::MAX), (u64::MAX, u64::MAX)]
    {
        let error = GuardedMapping::map(file.as_fd(), offset, len).expect_err("refused");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
    }
    assert_eq!(GuardedMapping::anonymous(0).expect_err("refused").kind(), io::ErrorKind::InvalidInput);
    assert_eq!(GuardedMapping::anonymous(usize::MAX).expect_err("refused").kind(), io::ErrorKind::InvalidInput);
    assert_eq!(GuardedMapping::create(0).expect_err("refused").kind(), io::ErrorKind::InvalidInput);
    let reading = File::open("/proc/self/exe").expect("opened");
    let error = GuardedMapping::map(reading.as_fd(), 0, 1).expect_err("opened for reading");
    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
}

#[test]
fn accesses_outside_panic() {
    let mapping = GuardedMapping::anonymous(100).expect("mapped");
    assert_eq!(bytes(&mapping, 0, 100), [0; 100]);
    mapping.read(100, &mut []);
    let accesses: [fn(&GuardedMapping); 8] = [
        |mapping| mapping.read(99, &mut [0; 2]),
        |mapping| mapping.write(101, &[]),
        |mapping| mapping.fill_zero(usize::MAX, 2),
        |mapping| mapping.read_into(0, 101, &mut BufMut::with_capacity(200)),
        |mapping| mapping.read_into(0, 10, &mut BufMut::with_capacity(9)),
        |mapping| _ = mapping.load_u16(1, Ordering::Relaxed),
        |mapping| mapping.store_u64(96, 0, Ordering::Relaxed),
        |mapping| _ = mapping.or_u8(100, 1, Ordering::Relaxed),
    ];
    for (at, access) in accesses.into_iter().enumerate() {
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| access(&mapping)));
        assert!(result.is_err(), "access {at}");
    }
}

#[test]
fn a_truncated_file_reads_as_zeroes() {
    let file = filled_file(16 * PAGE);
    let mapping = GuardedMapping::map(file.as_fd(), 10, 16 * PAGE as u64 - 10).expect("mapped");
    let other = GuardedMapping::map(file.as_fd(), 0, PAGE as u64).expect("mapped");
    file.set_len(4 * PAGE as u64).expect("truncated");
    assert!(!mapping.is_lost(), "no access has found it yet");
    // A read across the new end.
    let got = bytes(&mapping, 0, mapping.len());
    assert!(mapping.is_lost());
    assert!(got[..4 * PAGE - 10].iter().enumerate().all(|(at, byte)| *byte == pattern(at + 10)));
    assert!(got[4 * PAGE - 10..].iter().all(|byte| *byte == 0));
    // Writes go nowhere, and do not fail.
    mapping.write(8 * PAGE, b"lost");
    mapping.store_u32(12 * PAGE - 10, 1, Ordering::Relaxed);
    assert_eq!(file.metadata().expect("size").len(), 4 * PAGE as u64);
    mapping.write(0, b"kept");
    let mut read = [0; 4];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut read, 10).expect("read");
    assert_eq!(&read, b"kept");
    // Another mapping of the file is another matter.
    assert!(!other.is_lost());
    file.set_len(0).expect("truncated");
    assert_eq!(other.load_u64(8, Ordering::Acquire), 0);
    assert!(other.is_lost());
    // From the end to the start, a page at a time: the pages that were there before are lost too.
    for page in (0..4).rev() {
        mapping.fill_zero(page * PAGE, 1);
    }
    assert!(bytes(&mapping, 0, 4 * PAGE).iter().all(|byte| *byte == 0));
    // A new mapping in the same entry of the table starts afresh.
    drop((mapping, other));
    file.set_len(PAGE as u64).expect("grown");
    let mapping = GuardedMapping::map(file.as_fd(), 0, PAGE as u64).expect("mapped");
    assert!(!mapping.is_lost());
}

#[test]
fn threads_lose_mappings_at_the_same_time() {
    const LEN: usize = 64 * PAGE;
    let stop = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        // Mappings that come and go change the table all the time.
        for _ in 0..2 {
            scope.spawn(|| {
                let file = filled_file(PAGE);
                while !stop.load(Ordering::Relaxed) {
                    let kept = GuardedMapping::map(file.as_fd(), 0, PAGE as u64).expect("mapped");
                    drop(GuardedMapping::map(file.as_fd(), 1, PAGE as u64 - 1).expect("mapped"));
                    assert!(!kept.is_lost());
                }
            });
        }
        for round in 0..20 {
            let file = filled_file(LEN);
            let mapping = Arc::new(GuardedMapping::map(file.as_fd(), 0, LEN as u64).expect("mapped"));
            file.set_len(round * PAGE as u64 / 2).expect("truncated");
            let readers: Vec<_> = (0..4)
                .map(|_| {
                    let mapping = mapping.clone();
                    scope.spawn(move || bytes(&mapping, 0, LEN))
                })
                .collect();
            for reader in readers {
                let got = reader.join().expect("read");
                let end = round as usize * PAGE / 2;
                assert!(got[..end].iter().enumerate().all(|(at, byte)| *byte == pattern(at)));
                assert!(got[end..].iter().all(|byte| *byte == 0));
            }
            assert!(mapping.is_lost());
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn another_core_has_the_same_pages() {
    let file = filled_file(3 * PAGE);
    let mapping = GuardedMapping::map(file.as_fd(), 7, 2 * PAGE as u64).expect("mapped");
    let other = mapping.share();
    mapping.write(0, b"first");
    drop(mapping);
    // The pages outlive the mapping that they were made for.
    let third = std::thread::spawn(move || {
        assert_eq!((other.len(), bytes(&other, 0, 5)), (2 * PAGE, b"first".to_vec()));
        other.write(0, b"other");
        other.share()
    });
    let third = third.join().expect("no panic");
    assert_eq!(bytes(&third, 0, 6), [b"other", &[pattern(12)][..]].concat());
    let fourth = third.share();
    file.set_len(PAGE as u64).expect("truncated");
    assert_eq!(bytes(&third, PAGE, 10), [0; 10]);
    assert!(third.is_lost() && fourth.is_lost(), "all of them have lost the pages");
}

#[test]
fn huge_pages_are_lost_as_a_whole() {
    const HUGE: usize = 2 << 20;
    let flags = libc::MFD_HUGETLB | libc::MFD_HUGE_2MB;
    let Ok(file) = memory_file(4 * HUGE as u64, flags) else { return };
    let offset = HUGE + 12_288;
    // This machine may have no huge pages.
    let Ok(mapping) = GuardedMapping::map(file.as_fd(), offset as u64, HUGE as u64) else { return };
    mapping.write(0, b"huge");
    assert_eq!(bytes(&mapping, 0, 4), b"huge");
    file.set_len(2 * HUGE as u64).expect("truncated");
    assert_eq!(bytes(&mapping, HUGE - 12_288, 4), [0; 4]);
    assert!(mapping.is_lost());
    assert_eq!(bytes(&mapping, 0, 4), b"huge");
    file.set_len(0).expect("truncated");
    assert!(bytes(&mapping, 0, HUGE).iter().all(|byte| *byte == 0));
}

#[test]
fn the_number_of_mappings_is_limited() {
    // In a process of its own: other tests need entries too.
    assert_eq!(run("limit").code(), Some(HANDLED));
}

#[test]
fn other_faults_end_the_process() {
    assert_eq!(run("fault").signal(), Some(libc::SIGBUS));
    assert_eq!(run("fault, no previous").signal(), Some(libc::SIGBUS));
    assert_eq!(run("raise, no previous").signal(), Some(libc::SIGBUS));
}

#[test]
fn other_faults_go_to_the_previous_handler() {
    assert_eq!(run("fault, previous").code(), Some(HANDLED));
    assert_eq!(run("raise, previous").code(), Some(HANDLED));
    assert_eq!(run("fault, previous with information").code(), Some(HANDLED));
    assert_eq!(run("raise, ignored").code(), Some(HANDLED));
    assert_eq!(run("fault, ignored").signal(), Some(libc::SIGBUS));
}

/// Runs a case in a process of its own.
fn run(case: &str) -> ExitStatus {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "shared::run_a_case", "--nocapture"]).env(CASE, case);
    command.stdout(std::process::Stdio::null()).status().expect("a child")
}

extern "C" fn exit_handled(_: libc::c_int) {
    // SAFETY: it may be called in a handler.
    unsafe { libc::_exit(HANDLED) };
}

extern "C" fn exit_informed(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes valid information.
    let known = unsafe { (*info).si_code == libc::BUS_ADRERR && !(*info).si_addr().is_null() };
    // SAFETY: it may be called in a handler.
    unsafe { libc::_exit(if known { HANDLED } else { 1 }) };
}

fn set_action(action: usize, flags: libc::c_int) {
    // SAFETY: all zeroes is a valid sigaction; the action fits the flags.
    unsafe {
        let mut new: libc::sigaction = std::mem::zeroed();
        new.sa_sigaction = action;
        new.sa_flags = flags;
        assert_eq!(libc::sigaction(libc::SIGBUS, &new, std::ptr::null_mut()), 0);
    }
}

/// Reads a page that its file has lost, which nobody guards.
fn fault() {
    let file = memory_file(PAGE as u64, 0).expect("a memory file");
    // SAFETY: a new mapping, of which one byte is read.
    unsafe {
        let base = libc::mmap(std::ptr::null_mut(), PAGE, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
        assert_ne!(base, libc::MAP_FAILED);
        file.set_len(0).expect("truncated");
        std::ptr::read_volatile(base.cast::<u8>());
    }
}

/// Does nothing as a test; with a case in the environment, it is the child process of another.
#[test]
fn run_a_case() {
    let Ok(case) = std::env::var(CASE) else { return };
    // SAFETY: a valid limit; a process that is meant to end needs no core dump.
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &libc::rlimit { rlim_cur: 0, rlim_max: 0 }) };
    match case.split_once(", ").map(|(_, before)| before) {
        Some("no previous") => set_action(libc::SIG_DFL, 0),
        Some("previous") => set_action(exit_handled as *const () as usize, 0),
        Some("previous with information") => set_action(exit_informed as *const () as usize, libc::SA_SIGINFO),
        Some("ignored") => set_action(libc::SIG_IGN, 0),
        // The test program's own.
        _ => {}
    }
    // A loss that is handled, first.
    let file = filled_file(PAGE);
    let mapping = GuardedMapping::map(file.as_fd(), 0, PAGE as u64).expect("mapped");
    file.set_len(0).expect("truncated");
    assert_eq!(bytes(&mapping, 0, 4), [0; 4]);
    assert!(mapping.is_lost());
    match case.split(", ").next() {
        Some("fault") => fault(),
        // SAFETY: no pointers.
        Some("raise") => assert_eq!(unsafe { libc::raise(libc::SIGBUS) }, 0),
        Some("limit") => {
            let file = filled_file(PAGE);
            let map = || GuardedMapping::map(file.as_fd(), 0, PAGE as u64);
            let mut mappings: Vec<_> = (1..4096).map(|_| map().expect("mapped")).collect();
            let error = map().expect_err("one too many");
            assert_eq!(error.kind(), io::ErrorKind::QuotaExceeded, "{error}");
            mappings.pop();
            mappings.push(map().expect("an entry is free"));
            file.set_len(0).expect("truncated");
            assert!(mappings.iter().all(|mapping| bytes(mapping, 0, 1) == [0] && mapping.is_lost()));
        }
        other => panic!("no case: {other:?}"),
    }
    std::process::exit(if case.contains("fault") { 1 } else { HANDLED });
}
