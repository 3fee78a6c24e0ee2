#![no_main]

forebay_fuzz::targets! {
    "vhost_block_request" => forebay_vhost::block::fuzz::block_request,
    "vhost_inflight" => forebay_vhost::fuzz::inflight,
    "vhost_messages" => forebay_vhost::session::fuzz::messages,
    "vhost_packed_ring" => forebay_vhost::fuzz::packed_ring,
    "vhost_scsi_request" => forebay_vhost::scsi::fuzz::scsi_request,
    "vhost_split_ring" => forebay_vhost::fuzz::split_ring,
}
