//! Configuration space of a device, whatever its type (VIRTIO 1.2, section 2.5).

/// Copies the bytes from `offset` on; those past the known fields are zero.
pub(crate) fn copy(fields: &[u8], offset: u32, to: &mut [u8]) {
    let known = fields.get(offset as usize..).unwrap_or_default();
    let len = known.len().min(to.len());
    to[..len].copy_from_slice(&known[..len]);
    to[len..].fill(0);
}
