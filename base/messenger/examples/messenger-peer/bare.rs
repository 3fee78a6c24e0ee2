//! Loop on io_uring, through the same reactor as the messenger.

use std::io;

use forebay_reactor::{Addr, Buf, BufList, BufPool, Listener, Stream};

use crate::shape::{ANSWER, RECEIVE, Requests, Shape, Tally, bound};

/// Maximum number of answers in one send.
const ANSWERS_MAX: usize = RECEIVE / ANSWER + 1;

pub async fn serve(addr: &str, request: usize) -> io::Result<()> {
    let listener = Listener::bind(&addr.parse::<Addr>().expect("an address"))?;
    bound(&listener.local_addr().to_string());
    let (stream, _) = listener.accept().await?;
    let (pool, answers) = (BufPool::new(RECEIVE, 4), Buf::zeroed(ANSWER * ANSWERS_MAX));
    let mut requests = Requests::new(request);
    loop {
        let (got, _) = stream.recv(pool.get()).await;
        let whole = match got? {
            0 => return Ok(()),
            got => requests.received(got),
        };
        if whole > 0 {
            stream.send(answers.slice(0..ANSWER * whole)).await?;
        }
    }
}

pub async fn run(addr: &str, shape: Shape) -> io::Result<()> {
    let stream = Stream::connect(&addr.parse::<Addr>().expect("an address")).await?;
    let (pool, request) = (BufPool::new(RECEIVE, 4), Buf::copy_of(&vec![0xA5; shape.request]));
    let mut tally = Tally::new(&shape);
    while tally.goes_on() {
        if tally.credits > 0 {
            let batch: BufList = std::iter::repeat_n(request.clone(), std::mem::take(&mut tally.credits)).collect();
            stream.send(batch).await?;
        }
        let (got, _) = stream.recv(pool.get()).await;
        tally.received(got?);
    }
    tally.report();
    Ok(())
}
