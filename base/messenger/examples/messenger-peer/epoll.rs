//! Loop on plain sockets and epoll: a system call for each request, and for each answer.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::epoll;

use crate::shape::{ANSWER, Requests, Shape, Tally, bound};

fn poller(stream: &impl AsFd, flags: epoll::EventFlags) -> io::Result<OwnedFd> {
    let poller = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&poller, stream, epoll::EventData::new_u64(0), flags)?;
    Ok(poller)
}

fn wait(poller: &OwnedFd) -> io::Result<()> {
    let mut events = Vec::with_capacity(8);
    epoll::wait(poller, rustix::buffer::spare_capacity(&mut events), None)?;
    Ok(())
}

/// Writes everything, waiting where the socket is full.
fn write_all(stream: &mut TcpStream, writable: &OwnedFd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(len) => bytes = &bytes[len..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => wait(writable)?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn set_up(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)
}

/// Reads the available bytes; returns `None` if there are none.
fn read(stream: &mut TcpStream, buf: &mut [u8]) -> io::Result<Option<usize>> {
    match stream.read(buf) {
        Ok(got) => Ok(Some(got)),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

pub fn serve(addr: &str, request: usize) -> io::Result<()> {
    let listener = TcpListener::bind(addr)?;
    bound(&listener.local_addr()?.to_string());
    let (mut stream, _) = listener.accept()?;
    set_up(&stream)?;
    let readable = poller(&stream, epoll::EventFlags::IN)?;
    let writable = poller(&stream, epoll::EventFlags::OUT)?;
    let (mut buf, mut requests) = (vec![0; 64 << 10], Requests::new(request));
    loop {
        wait(&readable)?;
        let whole = match read(&mut stream, &mut buf)? {
            Some(0) => return Ok(()),
            Some(got) => requests.received(got),
            None => 0,
        };
        for _ in 0..whole {
            write_all(&mut stream, &writable, &[0; ANSWER])?;
        }
    }
}

pub fn run(addr: &str, shape: Shape) -> io::Result<()> {
    let mut stream = TcpStream::connect(addr)?;
    set_up(&stream)?;
    let either = poller(&stream, epoll::EventFlags::IN | epoll::EventFlags::OUT)?;
    let readable = poller(&stream, epoll::EventFlags::IN)?;
    let (request, mut buf) = (vec![0xA5; shape.request], vec![0; 64 << 10]);
    let (mut tally, mut sent) = (Tally::new(&shape), 0);
    while tally.goes_on() {
        let mut blocked = false;
        while tally.credits > 0 && !blocked {
            match stream.write(&request[sent..]) {
                Ok(len) => {
                    sent = (sent + len) % request.len();
                    tally.credits -= usize::from(sent == 0);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => blocked = true,
                Err(error) => return Err(error),
            }
        }
        wait(if blocked { &either } else { &readable })?;
        match read(&mut stream, &mut buf)? {
            Some(0) => return Err(ErrorKind::UnexpectedEof.into()),
            got => tally.received(got.unwrap_or(0)),
        }
    }
    tally.report();
    Ok(())
}
