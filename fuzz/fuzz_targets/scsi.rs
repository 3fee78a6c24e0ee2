#![no_main]

forebay_fuzz::targets! {
    "scsi_commands" => forebay_scsi::fuzz::commands,
}
