//! Loop on shared memory rings, polled continuously.

use std::io;
use std::os::fd::AsFd;

use forebay_reactor::{Addr, Listener, Stream, shm};

use crate::shape::{ANSWER, RECEIVE, Requests, Shape, Tally, bound};

pub async fn serve(path: &str, request: usize) -> io::Result<()> {
    let listener = Listener::bind(&format!("unix:{path}").parse::<Addr>().expect("an address"))?;
    bound(path);
    let (stream, _) = listener.accept().await?;
    let (mut producer, mut consumer, fd) = shm::create()?;
    stream.send_fd(fd.as_fd())?;
    let (mut buf, mut requests) = (vec![0; RECEIVE], Requests::new(request));
    // Until it is killed: nothing else happens on this core.
    loop {
        for _ in 0..requests.received(consumer.read(&mut buf)?.0) {
            let put = producer.write(&[0; ANSWER])?;
            assert_eq!(put, ANSWER, "no more requests are under way than there is room for answers");
        }
        producer.publish();
        std::hint::spin_loop();
    }
}

pub async fn run(path: &str, shape: Shape) -> io::Result<()> {
    let stream = Stream::connect(&format!("unix:{path}").parse::<Addr>().expect("an address")).await?;
    let (mut producer, mut consumer) = shm::adopt(&stream.recv_fd().await?)?;
    let (request, mut buf) = (vec![0xA5; shape.request], vec![0; RECEIVE]);
    let (mut tally, mut sent) = (Tally::new(&shape), 0);
    while tally.goes_on() {
        while tally.credits > 0 {
            let put = producer.write(&request[sent..])?;
            sent = (sent + put) % request.len();
            tally.credits -= usize::from(put > 0 && sent == 0);
            producer.publish();
            if put == 0 {
                break;
            }
        }
        tally.received(consumer.read(&mut buf)?.0);
        std::hint::spin_loop();
    }
    tally.report();
    Ok(())
}
