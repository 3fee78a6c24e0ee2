//! Which commands a session takes, and in which order (RFC 7143, section 4.2.2.1).

/// Numbers are compared as in RFC 1982.
fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

/// What becomes of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// It is the next.
    Now,
    /// Others come before it.
    Later,
    /// It was there before, or is past what may be sent: it is ignored.
    Never,
}

/// The numbers of a session's commands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window {
    expected: u32,
    last: u32,
}

impl Window {
    /// The next command has number `first`, and `room` commands may be sent.
    pub fn new(first: u32, room: u32) -> Self {
        Self { expected: first, last: first.wrapping_add(room).wrapping_sub(1) }
    }

    /// What becomes of a command with this number.
    pub fn place(&self, number: u32) -> Place {
        if number == self.expected && !before(self.last, number) {
            Place::Now
        } else if before(number, self.expected) || before(self.last, number) {
            Place::Never
        } else {
            Place::Later
        }
    }

    /// The next command was taken.
    pub fn take(&mut self) {
        self.expected = self.expected.wrapping_add(1);
    }

    /// `room` more commands may be sent from now on; what was said before is never taken back.
    pub fn open(&mut self, room: u32) {
        let last = self.expected.wrapping_add(room).wrapping_sub(1);
        if before(self.last, last) {
            self.last = last;
        }
    }

    /// The number that is expected next.
    pub fn expected(&self) -> u32 {
        self.expected
    }

    /// The last number that may be sent.
    pub fn last(&self) -> u32 {
        self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_go_around() {
        let mut window = Window::new(u32::MAX, 3);
        assert_eq!((window.expected(), window.last()), (u32::MAX, 1));
        assert_eq!(window.place(u32::MAX), Place::Now);
        assert_eq!(
            [0, 1, 2, u32::MAX - 1].map(|number| window.place(number)),
            [Place::Later, Place::Later, Place::Never, Place::Never]
        );
        window.take();
        window.open(1);
        assert_eq!(window.last(), 1, "what was offered stays");
        assert_eq!(window.place(0), Place::Now);
        (0..2).for_each(|_| window.take());
        assert_eq!(window.place(2), Place::Never, "the window is closed");
        window.open(1);
        assert_eq!(window.place(2), Place::Now);
    }
}
