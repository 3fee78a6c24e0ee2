#![no_main]

forebay_fuzz::targets! {
    "store_blob" => forebay_store::fuzz::blob,
    "store_checkpoint" => forebay_store::fuzz::checkpoint,
    "store_record" => forebay_store::fuzz::record,
    "store_superblock" => forebay_store::fuzz::superblock,
}
