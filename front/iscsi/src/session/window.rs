//! Command window: order and admission of a session's commands (RFC 7143, section 4.2.2.1).

/// Compares serial numbers as defined in RFC 1982.
fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

/// Position of a command in the window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CmdSnPosition {
    /// Next expected command.
    Next,
    /// Ahead of commands not yet received.
    Early,
    /// Duplicate, or beyond MaxCmdSN: the command is ignored.
    Ignored,
}

/// Command window: ExpCmdSN and MaxCmdSN of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandWindow {
    expected: u32,
    last: u32,
}

impl CommandWindow {
    /// Creates a window of `depth` commands; the first has number `first`.
    pub fn new(first: u32, depth: u32) -> Self {
        Self { expected: first, last: first.wrapping_add(depth).wrapping_sub(1) }
    }

    /// Returns the position of a command in the window.
    pub fn position(&self, number: u32) -> CmdSnPosition {
        if number == self.expected && !before(self.last, number) {
            CmdSnPosition::Next
        } else if before(number, self.expected) || before(self.last, number) {
            CmdSnPosition::Ignored
        } else {
            CmdSnPosition::Early
        }
    }

    /// Advances ExpCmdSN past the next command.
    pub fn take(&mut self) {
        self.expected = self.expected.wrapping_add(1);
    }

    /// Opens the window for `depth` commands; MaxCmdSN never decreases.
    pub fn open(&mut self, depth: u32) {
        let last = self.expected.wrapping_add(depth).wrapping_sub(1);
        if before(self.last, last) {
            self.last = last;
        }
    }

    /// Returns ExpCmdSN.
    pub fn expected(&self) -> u32 {
        self.expected
    }

    /// Returns MaxCmdSN.
    pub fn last(&self) -> u32 {
        self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_go_around() {
        let mut window = CommandWindow::new(u32::MAX, 3);
        assert_eq!((window.expected(), window.last()), (u32::MAX, 1));
        assert_eq!(window.position(u32::MAX), CmdSnPosition::Next);
        assert_eq!(
            [0, 1, 2, u32::MAX - 1].map(|number| window.position(number)),
            [CmdSnPosition::Early, CmdSnPosition::Early, CmdSnPosition::Ignored, CmdSnPosition::Ignored]
        );
        window.take();
        window.open(1);
        assert_eq!(window.last(), 1, "what was offered stays");
        assert_eq!(window.position(0), CmdSnPosition::Next);
        (0..2).for_each(|_| window.take());
        assert_eq!(window.position(2), CmdSnPosition::Ignored, "the window is closed");
        window.open(1);
        assert_eq!(window.position(2), CmdSnPosition::Next);
    }
}
