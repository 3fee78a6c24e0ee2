//! io_uring.
pub(crate) struct UringDriver;
impl UringDriver {
    pub(crate) fn new() -> std::io::Result<Self> {
        todo!()
    }
}
#[allow(unused_variables)]
impl super::Driver for UringDriver {
    fn name(&self) -> &'static str {
        todo!()
    }
    fn submit(&mut self, key: super::OpKey, op: super::Op) {
        todo!()
    }
    fn cancel(&mut self, key: super::OpKey) {
        todo!()
    }
    fn poll(&mut self, wait: super::Wait, done: &mut Vec<super::Completion>) {
        todo!()
    }
    fn now(&self) -> crate::Instant {
        todo!()
    }
    fn wall_clock(&self) -> std::time::Duration {
        todo!()
    }
    fn random(&mut self) -> u64 {
        todo!()
    }
    fn unparker(&self) -> std::sync::Arc<dyn super::Unpark> {
        todo!()
    }
    fn open(
        &mut self,
        path: &std::path::Path,
        options: super::OpenOptions,
    ) -> std::io::Result<(super::Handle, super::FileInfo)> {
        todo!()
    }
    fn file_size(&mut self, file: super::Handle) -> std::io::Result<u64> {
        todo!()
    }
    fn set_file_size(&mut self, file: super::Handle, size: u64) -> std::io::Result<()> {
        todo!()
    }
    fn remove_file(&mut self, path: &std::path::Path) -> std::io::Result<()> {
        todo!()
    }
    fn sync_dir(&mut self, path: &std::path::Path) -> std::io::Result<()> {
        todo!()
    }
    fn listen(&mut self, addr: &crate::Addr) -> std::io::Result<(super::Handle, crate::Addr)> {
        todo!()
    }
    fn shutdown(&mut self, sock: super::Handle) {
        todo!()
    }
    fn close(&mut self, handle: super::Handle) {
        todo!()
    }
}
